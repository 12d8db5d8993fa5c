"""Gated activations, and the squared ReLU."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.operations.core import Cost, liger, normal, operation, standard_case
from liger_models import kernels

SHAPES = {"shapes": ((32768, 14336),), "tiny": (64, 256), "small": (512, 14336)}


@operation(
    "geglu",
    "tokens x intermediate",
    **SHAPES,
    activation=partial(F.gelu, approximate="tanh"),
    peer="LigerGELUMulFunction",
)
@operation("swiglu", "tokens x intermediate", **SHAPES, activation=F.silu, peer="LigerSiLUMulFunction")
def _gated(shape, dtype, device, activation, peer):
    """Gate and up packed, as one projection returns them; liger-kernel takes them separately."""
    tokens, width = shape
    gate_up, dy = normal((tokens, 2 * width), dtype, device), normal(shape, dtype, device)

    def eager(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    def ours(gate_up):
        return kernels.swiglu(gate_up) if activation is F.silu else kernels.geglu(gate_up)

    return standard_case(
        (gate_up,),
        (dy,),
        ours=ours,
        liger=liger(
            peer,
            lambda apply, gate, up: apply(gate, up),
            leaves=lambda packed: tuple(part.contiguous() for part in packed[0].chunk(2, -1)),
            gradients=lambda parts: (torch.cat(parts, -1),),
        ),
        eager=eager,
        # Forward: gate and up in, the product out. Backward: gate, up and dy in, two gradients out.
        forward=Cost(3 * dy.nbytes),
        training=Cost(8 * dy.nbytes),
    )


@operation("clamped_swiglu", "tokens x intermediate", ((32768, 2880),), tiny=(64, 256), small=(512, 2880))
def _clamped_swiglu(shape, dtype, device):
    tokens, width = shape
    gate_up, dy = normal((tokens, 2 * width), dtype, device, 4.0), normal(shape, dtype, device)

    def eager(gate_up):
        gate, up = gate_up.chunk(2, -1)
        gate = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))

    return standard_case(
        (gate_up,),
        (dy,),
        ours=lambda gate_up: kernels.clamped_swiglu(gate_up),
        liger=None,
        eager=eager,
        forward=Cost(3 * dy.nbytes),
        training=Cost(8 * dy.nbytes),
    )


@operation("capped_swiglu", "tokens x intermediate", ((32768, 1280),), tiny=(64, 256), small=(512, 1280))
def _capped_swiglu(shape, dtype, device):
    tokens, width = shape
    gate_up, dy = normal((tokens, 2 * width), dtype, device, 4.0), normal(shape, dtype, device)

    def eager(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)

    return standard_case(
        (gate_up,),
        (dy,),
        ours=lambda gate_up: kernels.capped_swiglu(gate_up),
        liger=None,
        eager=eager,
        forward=Cost(3 * dy.nbytes),
        training=Cost(8 * dy.nbytes),
    )


@operation("relu2_gated", "tokens x intermediate", ((16384, 6912),), tiny=(64, 256), small=(512, 6912))
def _relu2_gated(shape, dtype, device):
    tokens, width = shape
    gate_up, dy = normal((tokens, 2 * width), dtype, device), normal(shape, dtype, device)

    def eager(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.relu(gate).square() * up

    return standard_case(
        (gate_up,),
        (dy,),
        ours=lambda gate_up: kernels.relu2_gated(gate_up),
        liger=None,
        eager=eager,
        forward=Cost(3 * dy.nbytes),
        training=Cost(8 * dy.nbytes),
    )


@operation("sparse_gated", "tokens x intermediate", ((16384, 16384),), tiny=(64, 256), small=(512, 16384))
def _sparse_gated(shape, dtype, device):
    """Gemma 3n's first layers, in the reference's operations, but with the cut-off computed in float32."""
    gate_up, dy = normal((shape[0], 2 * shape[1]), dtype, device), normal(shape, dtype, device)

    def eager(gate_up):
        gate, up = gate_up.chunk(2, -1)
        wide = gate.float()
        cutoff = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, unbiased=False) * 1.6448536
        return F.gelu(F.relu(wide - cutoff), approximate="tanh").to(up.dtype) * up

    return standard_case(
        (gate_up,),
        (dy,),
        ours=lambda gate_up: kernels.sparse_gated(gate_up, "gelu_tanh", 1.6448536),
        liger=None,
        eager=eager,
        forward=Cost(3 * dy.nbytes),
        training=Cost(8 * dy.nbytes),
    )


@operation("sigmoid_gated", "tokens x channels", ((16384, 4096),), tiny=(64, 256), small=(512, 1280))
def _sigmoid_gated(shape, dtype, device):
    gate, up, dy = (
        normal(shape, dtype, device, 4.0),
        normal(shape, dtype, device),
        normal(shape, dtype, device),
    )
    return standard_case(
        (gate, up),
        (dy,),
        ours=lambda gate, up: kernels.sigmoid_gated(gate, up),
        liger=None,
        eager=lambda gate, up: gate.sigmoid() * up,
        forward=Cost(3 * dy.nbytes),
        training=Cost(8 * dy.nbytes),
    )


@operation("relu2", "tokens x intermediate", **SHAPES)
def _relu2(shape, dtype, device):
    x, dy = normal(shape, dtype, device), normal(shape, dtype, device)
    return standard_case(
        (x,),
        (dy,),
        ours=lambda x: kernels.relu2(x),
        liger=liger("LigerReLUSquaredFunction", lambda apply, x: apply(x)),
        eager=lambda x: F.relu(x).square(),
        # Forward: x in, y out. Backward: x and dy in, dx out.
        forward=Cost(2 * x.nbytes),
        training=Cost(5 * x.nbytes),
    )


@operation("xielu", "tokens x intermediate", **SHAPES)
def _xielu(shape, dtype, device):
    x, dy = normal(shape, dtype, device), normal(shape, dtype, device)
    alphas = normal((1,), dtype, device), normal((1,), dtype, device)
    beta, eps = x.new_tensor(0.5), x.new_tensor(-1e-6)

    def eager(x, alpha_p, alpha_n):
        below = (torch.expm1(torch.min(x, eps)) - x) * (beta + F.softplus(alpha_n))
        return torch.where(x > 0, F.softplus(alpha_p) * x * x, below) + beta * x

    return standard_case(
        (x, *alphas),
        (dy,),
        ours=lambda x, alpha_p, alpha_n: kernels.xielu(x, alpha_p, alpha_n, beta, eps),
        liger=None,
        eager=eager,
        # As relu2: the two parameters are negligible.
        forward=Cost(2 * x.nbytes),
        training=Cost(5 * x.nbytes),
    )
