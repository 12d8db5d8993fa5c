"""RMSNorm with a gate, over groups of channels: the output norm of recurrent mixers.

    norm first (Qwen3-Next, Kimi Linear):      y = n * weight * act(gate),    n = x / rms(x)
    gate first (Mamba 2; Dao and Gu, 2024, arXiv:2405.21060, section 7):
                                               y = n * weight,   n = h / rms(h),   h = x * act(gate)

    rms(x) = sqrt(mean over the group of x^2 + eps),   act = silu or sigmoid

Gradients, with s = act(gate) and p(g) = (g - n * mean(g * n)) / rms:

    norm first:  dx = p(dy s weight),          dgate = dy n weight act'(gate),  dweight = sum dy s n
    gate first:  dh = p(dy weight), dx = dh s, dgate = dh x act'(gate),         dweight = sum dy n

Computed in float32. Minimum traffic, for T C elements of b bytes: forward 3 T C b, backward 5 T C b.
Only x and the gate are kept for the backward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    ceil_div,
    contiguous_like,
    next_power_of_2,
    num_sms,
    on_device_of,
    once_differentiable,
    shared_memory,
    use_triton,
)
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels._split_columns import place_of, room_for
from liger_models.kernels.norms._gated_norm_kernels import (
    backward_kernel,
    forward_kernel,
    wide_backward_kernel,
)
from liger_models.kernels.norms._norm_sums import column_sum

MAX_GROUP = 16384


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    group_size: int,
    gate_first: bool = False,
    activation: str = "silu",
    cast: str = "llama",
) -> Tensor:
    """RMSNorm over groups of `group_size` adjacent channels, multiplied by act(gate) before or after.

    Args:
        x: [..., C], any floating dtype; C is a multiple of `group_size`.
        gate: [..., C].
        weight: [group_size], shared by all groups, or [C].
        eps: added to the mean square.
        group_size: channels that are normalised together, at most 16,384.
        gate_first: multiply x by the gate before the norm, instead of the norm's output.
        activation: of the gate, "silu" or "sigmoid".
        cast: "llama" rounds n to x's dtype before the weight, and its product with the weight to the dtype
            to which PyTorch promotes both; "float32" rounds once, at the end.

    Returns:
        [..., C], contiguous: in x's dtype, or with `gate_first` and cast "llama" in the promoted dtype.

    Raises:
        ValueError: incompatible shapes, an unknown activation or cast, or tensors on different devices.
    """
    _check(x, gate, weight, group_size, activation, cast)
    options = (eps, group_size, gate_first, activation == "silu", cast == "llama")
    if use_triton(x, gate, weight):
        return _GatedRMSNorm.apply(x, gate, weight, *options)
    return as_once_differentiable(gated_rms_norm_plain(x, gate, weight, *options))


def gated_rms_norm_plain(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    gate_first: bool,
    silu: bool,
    round_first: bool,
) -> Tensor:
    """Plain twin of `gated_rms_norm`."""
    wide_gate = at_least_float32(gate)
    activated = F.silu(wide_gate) if silu else torch.sigmoid(wide_gate)
    wide = at_least_float32(x) * activated if gate_first else at_least_float32(x)
    groups = wide.unflatten(-1, (-1, group_size))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    scale = weight if len(weight) == group_size else weight.unflatten(0, (-1, group_size))
    if round_first:
        y = (scale * normed.to(x.dtype)).flatten(-2)
    else:
        y = (at_least_float32(scale) * normed).flatten(-2)
    if gate_first:
        return y if round_first else y.to(x.dtype)
    return (at_least_float32(y) * activated).to(x.dtype)


def _check(x: Tensor, gate: Tensor, weight: Tensor, group_size: int, activation: str, cast: str) -> None:
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation is {activation!r}; expected 'silu' or 'sigmoid'")
    if cast not in ("llama", "float32"):
        raise ValueError(f"cast is {cast!r}; expected 'llama' or 'float32'")
    if gate.shape != x.shape:
        raise ValueError(f"x is {tuple(x.shape)}, gate {tuple(gate.shape)}; expected one shape")
    channels = x.shape[-1]
    if not 1 <= group_size <= MAX_GROUP or channels % group_size:
        raise ValueError(
            f"group_size is {group_size}; expected a divisor of {channels}, x's last dimension, "
            f"of at most {MAX_GROUP}"
        )
    if weight.shape not in ((group_size,), (channels,)):
        raise ValueError(f"weight is {tuple(weight.shape)}; expected ({group_size},) or ({channels},)")


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, group_size, gate_first, silu, round_first):
        weight = weight.contiguous()
        ctx.save_for_backward(x, gate, weight)
        ctx.place = place_of(gate)
        ctx.eps, ctx.group_size = eps, group_size
        ctx.constants = {"GATE_FIRST": gate_first, "SILU": silu, "ROUND_FIRST": round_first}
        promoted = torch.promote_types(x.dtype, weight.dtype)
        y = contiguous_like(x, promoted if gate_first and round_first else None)
        if y.numel():
            x_rows, gate_rows = as_rows(x), as_rows(gate)
            groups = x.shape[-1] // group_size
            rows, own = _rows_of(x_rows, weight, group_size)
            block_rows, block_width, num_warps = _tile(group_size, 1)
            with on_device_of(x):
                forward_kernel[(ceil_div(rows, block_rows), own)](
                    x_rows,
                    gate_rows,
                    weight,
                    y,
                    x_rows.stride(0),
                    gate_rows.stride(0),
                    rows,
                    group_size,
                    eps,
                    FOLDED=groups // own,
                    **ctx.constants,
                    BLOCK_ROWS=block_rows,
                    BLOCK_WIDTH=block_width,
                    num_warps=num_warps,
                )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        dx, dgate = contiguous_like(x), room_for(gate, ctx.place)
        if not dx.numel():
            return dx, dgate, torch.zeros_like(weight), None, None, None, None, None
        x_rows, gate_rows, dy_rows = as_rows(x), as_rows(gate), as_rows(dy)
        dgate_rows = as_rows(dgate)
        group_size, groups = ctx.group_size, x.shape[-1] // ctx.group_size
        rows, own = _rows_of(x_rows, weight, group_size)
        wide = group_size > _WIDE
        block_rows, block_width, num_warps = _WIDE_TILE if wide else _tile(group_size, 2)
        at_once = (2 if wide else 4) * num_sms(x)
        programs = max(1, min(ceil_div(rows, block_rows), ceil_div(at_once, own)))
        sums = torch.empty(programs, len(weight), dtype=torch.float32, device=x.device)
        dweight = torch.empty_like(weight)
        strides = dy_rows.stride(0), x_rows.stride(0), gate_rows.stride(0), dgate_rows.stride(0)
        tensors = dy_rows, x_rows, gate_rows, weight, dx, dgate_rows, sums
        operands = *tensors, *strides, rows, group_size, ctx.eps
        constants = ctx.constants | {
            "FOLDED": groups // own,
            "BLOCK_WIDTH": block_width,
            "num_warps": num_warps,
        }
        with on_device_of(x):
            if wide:
                # Two programs fit on a multiprocessor of NVIDIA's.
                registers = {} if gpu_of(x).amd else {"maxnreg": 128}
                parts = ceil_div(group_size, block_width)
                wide_backward_kernel[(programs, own)](*operands, **constants, **registers, PARTS=parts)
            else:
                # Two tiles of each operand are in flight during a third, if shared memory holds them; AMD's
                # wait in registers.
                in_flight = 2 * block_rows * block_width * sum(t.element_size() for t in (x, gate, dy))
                stages = 3 if in_flight <= shared_memory(x) - 1024 and not gpu_of(x).amd else 1
                backward_kernel[(programs, own)](*operands, **constants, BLOCK_ROWS=block_rows, STAGES=stages)
            column_sum(sums, dweight)
        return dx, dgate, dweight, None, None, None, None, None


# Gradients of wider groups are computed in parts: rows, columns and warps of a tile.
_WIDE = 4096
_WIDE_TILE = (1, 2048, 8)


def _rows_of(x: Tensor, weight: Tensor, group_size: int) -> tuple[int, int]:
    """Rows per part of the weight that they share, and the number of such parts."""
    own = len(weight) // group_size
    return x.numel() // group_size // own, own


def _tile(group_size: int, halvings: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: about 8 elements per thread, fewer if more values are live."""
    block_width = next_power_of_2(group_size)
    block_rows = max(1, (4096 >> halvings) // block_width)
    elements = block_rows * block_width
    warps = 8 if halvings == 2 and block_width == 2048 else elements // 512
    return block_rows, block_width, min(16, max(4, warps))
