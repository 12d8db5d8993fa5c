"""RMSNorm, residual add + RMSNorm, LayerNorm; softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations.core import EPS, Cost, liger, near_one, normal, operation, standard_case, wide
from liger_models import kernels

NORM_SHAPES = {
    "shapes": ((32768, 4096), (8192, 2048), (32768, 8192)),
    "tiny": (64, 256),
    "small": (512, 4096),
}


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


@operation("rms_norm", "tokens x hidden", **NORM_SHAPES)
def _rms_norm(shape, dtype, device):
    x, weight = normal(shape, dtype, device), near_one(shape[-1], dtype, device)
    dy = normal(shape, dtype, device)
    return standard_case(
        (x, weight),
        (dy,),
        ours=lambda x, weight: kernels.rms_norm(x, weight, EPS),
        liger=liger("LigerRMSNormFunction", lambda apply, x, weight: apply(x, weight, EPS)),
        eager=eager_rms_norm,
        # Forward: x in, y out. Backward: x and dy in, dx out.
        forward=Cost(2 * x.nbytes),
        training=Cost(5 * x.nbytes),
    )


@operation("add_rms_norm", "tokens x hidden", **NORM_SHAPES)
def _add_rms_norm(shape, dtype, device):
    x, residual, dy, dtotal = (normal(shape, dtype, device) for _ in range(4))

    def eager(x, residual, weight):
        total = x + residual
        return eager_rms_norm(total, weight), total

    return standard_case(
        (x, residual, near_one(shape[-1], dtype, device)),
        (dy, dtotal),
        ours=lambda x, residual, weight: kernels.add_rms_norm(x, residual, weight, EPS),
        liger=liger("LigerFusedAddRMSNormFunction", lambda apply, x, r, weight: apply(x, r, weight, EPS)),
        eager=eager,
        # Forward: x and residual in, y and total out. Backward: dy, dtotal and total in, one gradient out.
        forward=Cost(4 * x.nbytes),
        training=Cost(8 * x.nbytes),
    )


@operation(
    "layer_norm",
    "tokens x hidden",
    ((32768, 8192), (8192, 4096), (8192, 1024)),
    tiny=(64, 256),
    small=(512, 4096),
)
def _layer_norm(shape, dtype, device):
    x, dy = normal(shape, dtype, device), normal(shape, dtype, device)
    return standard_case(
        (x, near_one(shape[-1], dtype, device), normal(shape[-1:], dtype, device)),
        (dy,),
        ours=lambda x, weight, bias: kernels.layer_norm(x, weight, bias, EPS),
        liger=liger("LigerLayerNormFunction", lambda apply, x, weight, bias: apply(x, weight, bias, EPS)),
        eager=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        forward=Cost(2 * x.nbytes),  # as of RMSNorm
        training=Cost(5 * x.nbytes),
    )


@operation(
    "add_layer_norm", "tokens x hidden", ((32768, 8192), (8192, 4096)), tiny=(64, 256), small=(512, 4096)
)
def _add_layer_norm(shape, dtype, device):
    x, residual, dy, dtotal = (normal(shape, dtype, device) for _ in range(4))

    def eager(x, residual, weight, bias):
        total = x + residual
        return F.layer_norm(total, total.shape[-1:], weight, bias, EPS), total

    return standard_case(
        (x, residual, near_one(shape[-1], dtype, device), normal(shape[-1:], dtype, device)),
        (dy, dtotal),
        ours=lambda x, residual, weight, bias: kernels.add_layer_norm(x, residual, weight, bias, EPS),
        liger=None,
        eager=eager,
        forward=Cost(4 * x.nbytes),  # as of RMSNorm with the residual add
        training=Cost(8 * x.nbytes),
    )


@operation("softmax", "rows x width", ((32768, 4096), (8192, 128256)), tiny=(64, 256), small=(512, 4096))
def _softmax(shape, dtype, device):
    x, dy = normal(shape, dtype, device, 3.0), normal(shape, dtype, device)
    return standard_case(
        (x,),
        (dy,),
        ours=lambda x: kernels.softmax(x),
        liger=liger("LigerSoftmaxFunction", lambda apply, x: apply(x)),
        eager=lambda x: x.softmax(-1),
        # Forward: x in, y out. Backward: y and dy in, dx out.
        forward=Cost(2 * x.nbytes),
        training=Cost(5 * x.nbytes),
    )
