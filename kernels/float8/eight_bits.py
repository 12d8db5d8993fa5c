"""Gated products whose inputs are kept in 8 bits for the backward pass.

    s_b = max |v_j| / 127 of each block of 64 neighbours of a row, rounded up to bfloat16
    c_j = round(v_j / s_b)
    y = act(gate') * up',   gate', up' = c s

Gate and up are rounded before the product, so y can be computed again from the codes, bit for bit, and the
gradients belong to the function that was computed. The codes are integers, not float8: only a matrix
product needs float8, and an integer with a scale for 64 neighbours has about a fifth of the rounding error
(of normally distributed numbers 0.6% in the root mean square, e4m3 2.6%).

y can be quantised to float8 by rows in the same pass, as can the gradient of gate and up (copies.py).

Minimum traffic a row of I outputs in bfloat16: forward 4 I to read, 2 I for y, 2.06 I for codes and scales;
backward 4.06 I to read, 4 I to write. Kept: 2.06 I bytes instead of 4 I.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_rows,
    ceil_div,
    jit,
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
)
from liger_models.kernels.float8.copies import carry_rows
from liger_models.kernels.float8.quantize import (
    Float8,
    as_magnitude,
    casts_to_float8,
    empty_rows,
    rows_plain,
    scale_for,
)

BLOCK = 64  # neighbours with one scale
SMALLEST = 2.0**-100  # magnitude of a block; the inverse scale of a smaller one would overflow


def gated_eight_bits(
    gate_up: Tensor, activation: Activation, *, float8: bool = False, float8_gradient: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """act(gate) * up of gate and up rounded to 8 bits; only the rounded ones are kept for the backward pass.

    Args:
        gate_up: [T, 2 I], gate first; bfloat16, float16 or float32.
        activation: "silu", "gelu_tanh", "gelu", or a clamped one with its limit.
        float8: let y carry its copy in e4m3 by rows (copies.py), where kernels can make it.
        float8_gradient: let the gradient of gate_up carry such a copy.

    Returns:
        y [T, I] in gate_up's dtype; codes [T, 2 I] int8; scales [T, 2, blocks] bfloat16, NaN for blocks with
        values that are not finite. Codes and scales are not differentiable.

    Raises:
        ValueError: not a matrix, or an odd last dimension.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up is {tuple(gate_up.shape)}; expected a matrix with an even last dimension, gate then up"
        )
    y, codes, scales, *rows = _EightBits.apply(gate_up, activation, float8, float8_gradient)
    if rows[0] is not None:
        carry_rows(y, Float8(*rows))
    return y, codes, scales


def gated_from_eight_bits(
    codes: Tensor, scales: Tensor, activation: Activation, dtype: torch.dtype, *, float8: bool = False
) -> Tensor:
    """The product from its kept inputs, with the bits of `gated_eight_bits`. Not differentiable."""
    y = torch.empty(len(codes), codes.shape[1] // 2, dtype=dtype, device=codes.device)
    rows = _product(None, codes, scales, y, activation, float8)
    return y if rows is None else carry_rows(y, rows)


def eight_bits_bytes(width: int) -> int:
    """Bytes of codes and scales a token, for gate and up of this width each."""
    return 2 * (width + 2 * ceil_div(width, BLOCK))


def eight_bits_plain(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Plain twin of the rounding: codes and scales of gate_up [T, 2 I]."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    blocks = ceil_div(width, BLOCK)
    padded = F.pad(gate_up.float().view(rows, 2, width), (0, blocks * BLOCK - width))
    padded = padded.view(rows, 2, blocks, BLOCK)
    largest = padded.abs().amax(-1)
    up = ((largest / 127).view(torch.int32) + 0xFFFF) & -0x10000  # to a bfloat16, upwards
    scales = up.view(torch.float32)
    scales = torch.where(largest < SMALLEST, 0.0, torch.where(largest.isfinite(), scales, torch.nan))
    inverse = torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    codes = torch.where(inverse > 0, padded * inverse, 0.0).round().to(torch.int8)
    return codes.flatten(2)[..., :width].reshape(rows, 2 * width), scales.bfloat16()


def decode_plain(codes: Tensor, scales: Tensor) -> Tensor:
    """Gate and up [T, 2 I] in float32 from their codes and scales."""
    rows, width = len(codes), codes.shape[1] // 2
    factors = scales.float().repeat_interleave(BLOCK, dim=-1)[..., :width]
    return (codes.view(rows, 2, width).float() * factors).view(rows, 2 * width)


class _EightBits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, activation: Activation, float8: bool, float8_gradient: bool
    ) -> tuple[Tensor | None, ...]:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        y = gate_up.new_empty(tokens, width)
        codes = gate_up.new_empty(tokens, 2 * width, dtype=torch.int8)
        scales = gate_up.new_empty(tokens, 2, ceil_div(width, BLOCK), dtype=torch.bfloat16)
        rows = _product(gate_up, codes, scales, y, activation, float8)
        ctx.save_for_backward(codes, scales)
        ctx.activation, ctx.float8_gradient = activation, float8_gradient
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(codes, scales, *(rows or ()))
        return y, codes, scales, *(rows or (None, None))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        codes, scales = ctx.saved_tensors
        return _gradient(dy, codes, scales, ctx.activation, ctx.float8_gradient), None, None, None


def _product(
    gate_up: Tensor | None, codes: Tensor, scales: Tensor, y: Tensor, activation: Activation, float8: bool
) -> Float8 | None:
    """Fill y, and codes and scales if gate_up is given; returns y in float8."""
    tokens, width = y.shape
    if not use_triton(y, codes, scales):
        if gate_up is not None:
            for kept, made in zip((codes, scales), eight_bits_plain(gate_up), strict=True):
                kept.copy_(made)
        y.copy_(gated_plain(decode_plain(codes, scales), None, activation))
        return rows_plain(y.float()) if float8 else None
    rows = empty_rows(y) if float8 and casts_to_float8(y) else None
    gate_up = None if gate_up is None else as_rows(gate_up)
    if y.numel():
        with on_device_of(y):
            _product_kernel[(tokens,)](
                *(gate_up, codes, scales, y, *(rows or (None, None))),
                *(0 if gate_up is None else gate_up.stride(0), width, scales.shape[-1]),
                **activation_constants(activation),
                COLUMNS=COLUMNS if gate_up is None else ROUNDED_COLUMNS,
                BLOCK=BLOCK,
                num_warps=8,
                **_ROUND_PRODUCTS,
            )
    return rows


def _gradient(dy: Tensor, codes: Tensor, scales: Tensor, activation: Activation, float8: bool) -> Tensor:
    """Gradient of gate_up."""
    tokens, width = dy.shape
    gradient = dy.new_empty(tokens, 2 * width)
    if not use_triton(dy, codes, scales):
        with torch.enable_grad():
            gate_up = decode_plain(codes, scales).requires_grad_()
            y = gated_plain(gate_up, None, activation)
        gradient.copy_(torch.autograd.grad(y, gate_up, dy.float())[0])
        return carry_rows(gradient, rows_plain(gradient.float())) if float8 else gradient
    rows = empty_rows(gradient) if float8 and casts_to_float8(dy) else None
    dy = as_rows(dy)
    if dy.numel():
        with on_device_of(dy):
            _gradient_kernel[(tokens,)](
                *(dy, codes, scales, gradient, *(rows or (None, None))),
                *(dy.stride(0), width, scales.shape[-1]),
                **activation_constants(activation),
                COLUMNS=COLUMNS,
                BLOCK=BLOCK,
                num_warps=8,
                **_ROUND_PRODUCTS,
            )
    return gradient if rows is None else carry_rows(gradient, rows)


# Columns of a row that a program holds at a time, as measured on an H100: where both inputs are rounded, too,
# and otherwise.
ROUNDED_COLUMNS, COLUMNS = 2048, 4096
# No fused multiply-add: it would round some codes in another way than the plain twin.
_ROUND_PRODUCTS = {"enable_fp_fusion": False}


@jit
def _product_kernel(
    gate_up,
    codes,
    scales,
    y,
    values,
    row_scales,
    stride,
    width,
    blocks,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, COLUMNS // BLOCK)
    place = first[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes += row * 2 * width
    scales += row * 2 * blocks
    largest = tl.zeros([COLUMNS // BLOCK, BLOCK], dtype=tl.int32)
    for start in range(0, width, COLUMNS):
        column, block = start + place, start // BLOCK + first
        inside, present = column < width, block < blocks
        if gate_up is not None:
            x = gate_up + row * stride + column
            g = _encoded(x, codes + column, scales + block, inside, present)
            u = _encoded(x + width, codes + width + column, scales + blocks + block, inside, present)
        else:
            g = _decoded(codes + column, scales + block, inside, present)
            u = _decoded(codes + width + column, scales + blocks + block, inside, present)
        activated, _, factor, _ = gated_factors(g, u, ACTIVATION, ALPHA, LIMIT)
        product = (activated * factor).to(y.dtype.element_ty)
        tl.store(y + row * width + column, product, inside)
        bits = tl.abs(product.to(tl.float32)).to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, tl.where(inside, bits, 0))
    if values is not None:
        _write_rows(y, values, row_scales, row, width, largest, place, COLUMNS)


@jit
def _gradient_kernel(
    dy,
    codes,
    scales,
    gradient,
    values,
    row_scales,
    stride,
    width,
    blocks,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, COLUMNS // BLOCK)
    place = first[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes += row * 2 * width
    scales += row * 2 * blocks
    largest = tl.zeros([COLUMNS // BLOCK, BLOCK], dtype=tl.int32)
    for start in range(0, width, COLUMNS):
        column, block = start + place, start // BLOCK + first
        inside, present = column < width, block < blocks
        upstream = tl.load(dy + row * stride + column, inside, 0.0).to(tl.float32)
        g = _decoded(codes + column, scales + block, inside, present)
        u = _decoded(codes + width + column, scales + blocks + block, inside, present)
        activated, derivative, factor, factor_derivative = gated_factors(g, u, ACTIVATION, ALPHA, LIMIT)
        target = gradient + row * 2 * width + column
        dgate = (upstream * factor * derivative).to(gradient.dtype.element_ty)
        dup = (upstream * activated * factor_derivative).to(gradient.dtype.element_ty)
        tl.store(target, dgate, inside)
        tl.store(target + width, dup, inside)
        bits = tl.abs(dgate.to(tl.float32)).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, tl.abs(dup.to(tl.float32)).to(tl.int32, bitcast=True))
        largest = tl.maximum(largest, tl.where(inside, bits, 0))
    if values is not None:
        _write_rows(gradient, values, row_scales, row, 2 * width, largest, place, COLUMNS)


@jit
def _write_rows(x, values, row_scales, row, width, largest, place, COLUMNS: tl.constexpr):
    """Quantise a row that this program has written, from the cache; `largest` are the bits of magnitudes."""
    tl.debug_barrier()  # this thread reads values that other threads wrote
    scale = scale_for(as_magnitude(tl.max(tl.max(largest, 1), 0)), 448.0)
    tl.store(row_scales + row, scale)
    for start in range(0, width, COLUMNS):
        column = start + place
        inside = column < width
        value = tl.load(x + row * width + column, inside, 0.0).to(tl.float32) * (1.0 / scale)
        tl.store(values + row * width + column, value.to(values.dtype.element_ty), inside)


@jit
def _encoded(x, codes, scales, inside, present):
    """Round to codes and scales, store both, and return the rounded values."""
    value = tl.load(x, inside, 0.0).to(tl.float32)
    bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 1)
    magnitude = bits.to(tl.float32, bitcast=True)
    up = (tl.math.div_rn(magnitude, 127.0).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    kept = tl.where(magnitude < 7.888609052210118e-31, 0.0, up.to(tl.float32, bitcast=True))  # SMALLEST
    kept = tl.where(bits >= 0x7F800000, float("nan"), kept)
    tl.store(scales, kept.to(scales.dtype.element_ty), present)
    inverse = tl.where(kept > 0.0, tl.math.div_rn(1.0, tl.where(kept > 0.0, kept, 1.0)), 0.0)
    code = tl.where(inverse[:, None] > 0.0, value * inverse[:, None], 0.0)
    code = (code + 12582912.0) - 12582912.0  # to an integer, halves to even
    tl.store(codes, code.to(tl.int8), inside)
    return code * kept[:, None]


@jit
def _decoded(codes, scales, inside, present):
    scale = tl.load(scales, present, 0.0).to(tl.float32)
    return tl.load(codes, inside, 0).to(tl.float32) * scale[:, None]
