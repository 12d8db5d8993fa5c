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
    jit,
    next_power_of_2,
    num_sms,
    on_device_of,
    once_differentiable,
    shared_memory,
    tl,
    use_triton,
)
from liger_models.kernels._fast_math import sigmoid
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.norms._norm_sums import column_sum, rstd_of

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
                _forward_kernel[(ceil_div(rows, block_rows), own)](
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
        dx, dgate = contiguous_like(x), contiguous_like(gate)
        if not dx.numel():
            return dx, dgate, torch.zeros_like(weight), None, None, None, None, None
        x_rows, gate_rows, dy_rows = as_rows(x), as_rows(gate), as_rows(dy)
        group_size, groups = ctx.group_size, x.shape[-1] // ctx.group_size
        rows, own = _rows_of(x_rows, weight, group_size)
        wide = group_size > _WIDE
        block_rows, block_width, num_warps = _WIDE_TILE if wide else _tile(group_size, 2)
        programs = max(1, min(ceil_div(rows, block_rows), ceil_div(4 * num_sms(x), own)))
        sums = torch.empty(programs, len(weight), dtype=torch.float32, device=x.device)
        dweight = torch.empty_like(weight)
        strides = dy_rows.stride(0), x_rows.stride(0), gate_rows.stride(0)
        operands = dy_rows, x_rows, gate_rows, weight, dx, dgate, sums, *strides, rows, group_size, ctx.eps
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
                _wide_backward_kernel[(programs, own)](*operands, **constants, **registers, PARTS=parts)
            else:
                # Two tiles of each operand are in flight during a third, if shared memory holds them; AMD's
                # wait in registers.
                in_flight = 2 * block_rows * block_width * sum(t.element_size() for t in (x, gate, dy))
                stages = 3 if in_flight <= shared_memory(x) - 1024 and not gpu_of(x).amd else 1
                _backward_kernel[(programs, own)](
                    *operands, **constants, BLOCK_ROWS=block_rows, STAGES=stages
                )
            column_sum(sums, dweight)
        return dx, dgate, dweight, None, None, None, None, None


# Gradients of wider groups are computed in parts: rows, columns and warps of a tile.
_WIDE = 2048
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
    return block_rows, block_width, min(16, max(4, elements // 512))


@jit
def _weight_rows(weight, own, mask, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """The weight in every row of a tile, loaded in the tile's layout: if it had one of its own, Triton would
    move all tiles into that.
    """
    places = tl.broadcast_to(weight + own, (BLOCK_ROWS, BLOCK_WIDTH))
    return tl.load(places, tl.broadcast_to(mask, (BLOCK_ROWS, BLOCK_WIDTH)), 0.0)


@jit
def _add_pairs(first, second, more_first, more_second):
    return first + more_first, second + more_second


@jit
def _activation(gate, SILU: tl.constexpr):
    """act(gate) and its derivative."""
    slope = sigmoid(gate)
    derivative = slope * (1 - slope)
    if SILU:
        return gate * slope, slope + gate * derivative
    return slope, derivative


@jit
def _forward_kernel(
    x,
    gate,
    weight,
    y,
    x_stride,
    gate_stride,
    rows,
    width,
    eps,
    FOLDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    # 64 bits only if there are so many rows: their division takes longer than all else.
    row = (tl.program_id(0) + 0 * rows) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    token, group = (row // FOLDED).to(tl.int64), row % FOLDED + tl.program_id(1)
    mask = (row < rows) & (column < width)
    within = group * width + column
    own = tl.program_id(1) * width + column
    value = tl.load(x + token * x_stride + within, mask, 0.0)
    dtype = value.dtype
    value = value.to(tl.float32)
    activated, _ = _activation(tl.load(gate + token * gate_stride + within, mask, 0.0).to(tl.float32), SILU)
    if GATE_FIRST:
        value *= activated
    normed = value * rstd_of(tl.sum(value * value, 1, keep_dims=True), width, eps)
    scale = _weight_rows(weight, own, column < width, BLOCK_ROWS, BLOCK_WIDTH)
    if ROUND_FIRST:
        promoted = (scale * normed.to(dtype)).dtype
        result = (scale.to(tl.float32) * normed.to(dtype).to(tl.float32)).to(promoted).to(tl.float32)
    else:
        result = scale.to(tl.float32) * normed
    if not GATE_FIRST:
        result *= activated
    channels = width * FOLDED * tl.num_programs(1)
    tl.store(y + token * channels + within, result.to(y.dtype.element_ty), mask)


@jit
def _tile_values(x, gate, dy, mask, GATE_FIRST: tl.constexpr, SILU: tl.constexpr):
    """x, act(gate) and its derivative, h, dy, and the gradient of n * weight, of a tile."""
    value = tl.load(x, mask, 0.0).to(tl.float32)
    raw_gate = tl.load(gate, mask, 0.0).to(tl.float32)
    gradient = tl.load(dy, mask, 0.0).to(tl.float32)
    activated, slope = _activation(raw_gate, SILU)
    hidden = value * activated if GATE_FIRST else value
    upstream = gradient if GATE_FIRST else gradient * activated
    return value, activated, slope, hidden, gradient, upstream


@jit
def _tile_grads(
    values, scale, rstd, mean, dtype: tl.constexpr, GATE_FIRST: tl.constexpr, ROUND_FIRST: tl.constexpr
):
    """The terms of dweight, dx and dgate of a tile; `mean` of dn * n over the group."""
    value, activated, slope, hidden, gradient, upstream = values
    normed = hidden * rstd
    seen = normed.to(dtype).to(tl.float32) if ROUND_FIRST else normed  # the factor of the weight
    dhidden = (upstream * scale - normed * mean) * rstd
    if GATE_FIRST:
        dvalue, dgate = dhidden * activated, dhidden * value * slope
    else:
        dvalue, dgate = dhidden, gradient * seen * scale * slope
    return upstream * seen, dvalue, dgate


@jit
def _backward_kernel(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    sums,
    dy_stride,
    x_stride,
    gate_stride,
    rows,
    width,
    eps,
    FOLDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    own = tl.program_id(1) * width + column
    channels = width * FOLDED * tl.num_programs(1)
    scale = _weight_rows(weight, own, column < width, BLOCK_ROWS, BLOCK_WIDTH).to(tl.float32)
    accumulated = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    one_over_width = 1.0 / width
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        token, group = (row // FOLDED).to(tl.int64), row % FOLDED + tl.program_id(1)
        mask = (row < rows) & (column < width)
        within = group * width + column
        values = _tile_values(
            x + token * x_stride + within,
            gate + token * gate_stride + within,
            dy + token * dy_stride + within,
            mask,
            GATE_FIRST,
            SILU,
        )
        hidden, upstream = values[3], values[5]
        # One reduction for both sums: threads wait for each other once.
        squares, products = tl.reduce(
            (hidden * hidden, upstream * scale * hidden), 1, _add_pairs, keep_dims=True
        )
        rstd = rstd_of(squares, width, eps)
        mean = products * rstd * one_over_width
        terms, dvalue, draw = _tile_grads(
            values, scale, rstd, mean, x.dtype.element_ty, GATE_FIRST, ROUND_FIRST
        )
        accumulated += terms
        target = token * channels + within
        tl.store(dx + target, dvalue.to(dx.dtype.element_ty), mask)
        tl.store(dgate + target, draw.to(dgate.dtype.element_ty), mask)
    total = tl.sum(accumulated, 0, keep_dims=True)
    weights = width * tl.num_programs(1)
    tl.store(sums + tl.program_id(0) * weights + own, total, column < width)


@jit
def _wide_backward_kernel(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    sums,
    dy_stride,
    x_stride,
    gate_stride,
    rows,
    width,
    eps,
    FOLDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """As `_backward_kernel`, for groups too wide to keep in registers: a row is read in parts, first for its
    sums, then once more, from the cache, for its gradients.
    """
    channels = width * FOLDED * tl.num_programs(1)
    one_over_width = 1.0 / width
    weight += tl.program_id(1) * width
    accumulated = ()
    for _ in tl.static_range(PARTS):
        accumulated += (tl.zeros([BLOCK_WIDTH], tl.float32),)
    for nth in range(0, tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + nth * tl.num_programs(0)
        token, group = (row // FOLDED).to(tl.int64), row % FOLDED + tl.program_id(1)
        x_row = x + token * x_stride + group * width
        gate_row = gate + token * gate_stride + group * width
        dy_row = dy + token * dy_stride + group * width
        squares = tl.zeros([BLOCK_WIDTH], tl.float32)
        products = tl.zeros([BLOCK_WIDTH], tl.float32)
        for part in tl.static_range(PARTS):
            column = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            mask = column < width
            values = _tile_values(x_row + column, gate_row + column, dy_row + column, mask, GATE_FIRST, SILU)
            scale = tl.load(weight + column, mask, 0.0).to(tl.float32)
            squares += values[3] * values[3]
            products += values[5] * scale * values[3]
        square, product = tl.reduce((squares, products), 0, _add_pairs)
        rstd = rstd_of(square, width, eps)
        mean = product * rstd * one_over_width
        target = token * channels + group * width
        more = ()
        for part in tl.static_range(PARTS):
            column = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            mask = column < width
            values = _tile_values(x_row + column, gate_row + column, dy_row + column, mask, GATE_FIRST, SILU)
            scale = tl.load(weight + column, mask, 0.0).to(tl.float32)
            terms, dvalue, draw = _tile_grads(
                values, scale, rstd, mean, x.dtype.element_ty, GATE_FIRST, ROUND_FIRST
            )
            more += (accumulated[part] + terms,)
            tl.store(dx + target + column, dvalue.to(dx.dtype.element_ty), mask)
            tl.store(dgate + target + column, draw.to(dgate.dtype.element_ty), mask)
        accumulated = more
    weights = width * tl.num_programs(1)
    sums += tl.program_id(0) * weights + tl.program_id(1) * width
    for part in tl.static_range(PARTS):
        column = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        tl.store(sums + column, accumulated[part], column < width)
