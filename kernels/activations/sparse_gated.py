"""Gated activations of gates that exceed a cutoff (Gemma 3n; the threshold of a normal distribution stands in
for the top k of a row).

    c = mean(gate) + k std(gate),   y = act(max(gate - c, 0)) * up        over a row

Everything is in float32 and rounded once, except for k, which is first rounded to the gate's dtype, as in the
reference. std divides by the width; where it is zero, its gradient is.

With g = gate - c and a = dy up act'(g) where g > 0, else 0:

    dgate = a - mean(a) (1 + k (gate - mean) / std),   dup = dy act(max(g, 0))

Traffic, for I outputs a row of b bytes each: 3 I b forward and 5 I b backward. A row's second and third pass
read the gate, and the last one of the backward pass all inputs, from a cache. Kept are the inputs, and mean
and std in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)
from liger_models.kernels.activations.gated import (
    Activation,
    activation_constants,
    gated_factors,
    gated_plain,
    room_for_gradient,
)


def sparse_gated(
    gate_up: Tensor, activation: Activation, deviations: float, *, reuse_input: bool = False
) -> Tensor:
    """act(max(gate - c, 0)) * up, c the mean of the gate's row and a multiple of its standard deviation.

    Args:
        gate_up: [..., 2 I], gate first.
        activation: as in `gated_plain`.
        deviations: the multiple k. With a quantile of the standard normal distribution about that share of
            the gates is below the cutoff.
        reuse_input: as for `swiglu`.

    Returns:
        [..., I] in the input's dtype, contiguous. Results are deterministic.

    Raises:
        ValueError: an odd last dimension.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}; expected an even last dimension, gate then up")
    deviations = _rounded(deviations, gate_up.dtype)
    if not use_triton(gate_up):
        return as_once_differentiable(sparse_gated_plain(gate_up, activation, deviations))
    return _SparseGated.apply(gate_up, activation, deviations, reuse_input)


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A number of ordinary size, rounded to a dtype."""
    mantissa, exponent = math.frexp(number)
    steps = 2 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)


def sparse_gated_plain(gate_up: Tensor, activation: Activation, deviations: float) -> Tensor:
    """Plain twin of `sparse_gated`."""
    gate, up = gate_up.chunk(2, -1)
    wide = at_least_float32(gate)
    cutoff = wide.mean(-1, keepdim=True) + deviations * wide.std(-1, unbiased=False, keepdim=True)
    return gated_plain((wide - cutoff).relu(), at_least_float32(up), activation).to(up.dtype)


class _SparseGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, activation, deviations, reuse_input):
        *lead, width = gate_up.shape
        y = gate_up.new_empty(*lead, width // 2)
        moments = torch.empty(*lead, 2, dtype=torch.float32, device=gate_up.device)
        if y.numel():
            rows = as_rows(gate_up)
            with on_device_of(y):
                _forward_kernel[(len(rows),)](
                    *(rows, y, moments, rows.stride(0), width // 2, deviations),
                    **_constants(width // 2, activation),
                )
        ctx.save_for_backward(gate_up, moments)
        ctx.activation, ctx.deviations, ctx.reuse_input = activation, deviations, reuse_input
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate_up, moments = ctx.saved_tensors
        dgate_up = room_for_gradient(gate_up, ctx.reuse_input)
        if dy.numel():
            dy, rows = as_rows(dy), as_rows(gate_up)
            with on_device_of(dy):
                _backward_kernel[(len(rows),)](
                    *(dy, rows, moments, dgate_up, dy.stride(0), rows.stride(0), dy.shape[1]),
                    ctx.deviations,
                    **_constants(dy.shape[1], ctx.activation),
                )
        return dgate_up, None, None, None


def _constants(width: int, activation: Activation) -> dict[str, object]:
    block = min(2048, next_power_of_2(width))
    return {"BLOCK": block, **activation_constants(activation), "num_warps": 8}


@jit
def _forward_kernel(
    gate,
    y,
    moments,
    stride,
    width,
    deviations,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate += row * stride
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        total += tl.load(gate + start + column, start + column < width, 0.0).to(tl.float32)
    mean = tl.sum(total, 0) / width
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        g = tl.load(gate + start + column, mask, 0.0).to(tl.float32)
        total += tl.where(mask, (g - mean) * (g - mean), 0.0)
    std = tl.sqrt_rn(tl.sum(total, 0) / width)
    tl.store(moments + row * 2, mean)
    tl.store(moments + row * 2 + 1, std)
    cutoff = mean + deviations * std
    for start in range(0, width, BLOCK):
        mask = start + column < width
        g = tl.load(gate + start + column, mask, 0.0).to(tl.float32) - cutoff
        u = tl.load(gate + width + start + column, mask, 0.0).to(tl.float32)
        activated, _, factor, _ = gated_factors(tl.maximum(g, 0.0), u, ACTIVATION, ALPHA, LIMIT)
        tl.store(y + row * width + start + column, (activated * factor).to(y.dtype.element_ty), mask)


@jit
def _backward_kernel(
    dy,
    gate,
    moments,
    dgate,
    dy_stride,
    stride,
    width,
    deviations,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dy += row * dy_stride
    gate += row * stride
    dgate += row * 2 * width
    mean, std = tl.load(moments + row * 2), tl.load(moments + row * 2 + 1)
    cutoff = mean + deviations * std
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        upstream = tl.load(dy + start + column, mask, 0.0).to(tl.float32)
        g = tl.load(gate + start + column, mask, 0.0).to(tl.float32) - cutoff
        u = tl.load(gate + width + start + column, mask, 0.0).to(tl.float32)
        _, derivative, factor, _ = gated_factors(tl.maximum(g, 0.0), u, ACTIVATION, ALPHA, LIMIT)
        total += tl.where(mask & (g > 0), upstream * factor * derivative, 0.0)
    shared = tl.sum(total, 0) / width
    slope = tl.where(std > 0, deviations / std, 0.0)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        upstream = tl.load(dy + start + column, mask, 0.0).to(tl.float32)
        x = tl.load(gate + start + column, mask, 0.0).to(tl.float32)
        u = tl.load(gate + width + start + column, mask, 0.0).to(tl.float32)
        g = x - cutoff
        activated, derivative, factor, factor_derivative = gated_factors(
            tl.maximum(g, 0.0), u, ACTIVATION, ALPHA, LIMIT
        )
        own = tl.where(g > 0, upstream * factor * derivative, 0.0) - shared * (1.0 + slope * (x - mean))
        tl.store(dgate + start + column, own.to(dgate.dtype.element_ty), mask)
        of_up = upstream * activated * factor_derivative
        tl.store(dgate + width + start + column, of_up.to(dgate.dtype.element_ty), mask)
