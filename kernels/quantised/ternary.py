"""Operands of products rounded to 8 bits and to three values (BitNet b1.58: Ma et al., 2024,
arXiv:2402.17764, section 2).

    T(x) = clip(round(x s), -128, 127) / s          s = 127 / max |x|, of each row
    T(W) = clip(round(W s), -1, 1) / s              s = 1 / mean |W|, of each part of W

The mean and the maxima are at least 1e-5. T is computed in float32 and rounded to the dtype of x or W, in the
order of operations of transformers' `AutoBitLinear`, whose bits it has. There is no gradient: it passes
through both roundings (layers/projections/ternary.py).

At the least, an element of b bytes is read and written once: 2 b. The mean reads W once more; it is torch's,
of |W|, since another order of its sum would have other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_rows,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
    use_triton,
)

SMALLEST = 1e-5  # of a mean or a maximum
BAND = 1 << 23  # elements that the plain twins round at a time: 32 MiB in float32
_WIDEST = 16384  # elements of a row that fits in registers
_BLOCK = 4096


@torch.no_grad()
def round_inputs(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Round each row to 8 bits.

    Args:
        x: [..., in], floating dtype, any strides.
        dtype: of the result; None: that of x, to which T(x) is rounded first.

    Returns:
        T(x), [..., in], contiguous. A row with an infinity or a NaN is all NaN. Not differentiable.
    """
    dtype = dtype or x.dtype
    if not use_triton(x) or dtype == torch.float64:
        return round_inputs_plain(x, dtype)
    rows = as_rows(x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        count, columns = rows.shape
        block = min(next_power_of_2(columns), _WIDEST)
        with on_device_of(x):
            _rows_kernel[(count,)](
                rows,
                out,
                rows.stride(0),
                columns,
                SMALLEST=SMALLEST,
                BLOCK=block,
                WHOLE=columns <= block,
                num_warps=max(1, min(16, block // 512)),
                enable_fp_fusion=False,  # a product that is rounded only in a sum has other bits
            )
    return out


def round_inputs_plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Plain twin of `round_inputs`."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    for band in _bands(rows):
        narrow = _at_most_float32(rows[band])
        low, high = torch.aminmax(narrow, dim=-1, keepdim=True)
        scale = 127 / torch.maximum(high, -low).float().clamp_(min=SMALLEST)
        # None exceeds 127, which the scale makes of the largest.
        _divide(torch.mul(narrow, scale).round_(), scale, out[band], x.dtype)
    return out.view(x.shape)


@torch.no_grad()
def weight_scales(weight: Tensor, heights: Sequence[int]) -> tuple[Tensor, ...]:
    """The scale s of each part of a weight.

    Args:
        weight: [out, in], floating dtype.
        heights: the rows of each part; their sum is `out`.

    Returns:
        One number in float32 for each part.
    """
    narrow = weight.float() if weight.dtype == torch.float64 else weight
    # |W| in the dtype of W and a sum in float32 are as exact as of a copy in float32, and need no copy.
    means = (part.abs().mean(dtype=torch.float32) for part in narrow.split(list(heights)))
    return tuple(1.0 / mean.clamp_(min=SMALLEST) for mean in means)


@torch.no_grad()
def round_weights(
    weight: Tensor,
    heights: Sequence[int],
    dtype: torch.dtype | None = None,
    scales: Sequence[Tensor] | None = None,
) -> Tensor:
    """Round each part of a weight to three values.

    Args:
        weight: [out, in], floating dtype, any strides.
        heights: the rows of each part; their sum is `out`.
        dtype: of the result; None: that of W, to which T(W) is rounded first.
        scales: `weight_scales` of the same, to find them once; None: they are found here.

    Returns:
        T(W), [out, in], contiguous. Not differentiable.
    """
    dtype, scales = dtype or weight.dtype, weight_scales(weight, heights) if scales is None else scales
    if not use_triton(weight) or dtype == torch.float64:
        return round_weights_plain(weight, heights, dtype, scales)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    parts = zip(weight.contiguous().split(list(heights)), out.split(list(heights)), scales, strict=True)
    with on_device_of(weight):
        for part, target, scale in parts:
            if count := part.numel():
                _values_kernel[(ceil_div(count, _BLOCK),)](
                    part, target, scale, count, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
                )
    return out


def round_weights_plain(
    weight: Tensor, heights: Sequence[int], dtype: torch.dtype, scales: Sequence[Tensor]
) -> Tensor:
    """Plain twin of `round_weights`."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    parts = zip(weight.split(list(heights)), out.split(list(heights)), scales, strict=True)
    for part, target, scale in parts:
        scale = scale.view(1, 1)  # a number would not make the product float32
        for band in _bands(part):
            wide = torch.mul(_at_most_float32(part[band]), scale).round_().clamp_(-1, 1)
            _divide(wide, scale, target[band], weight.dtype)
    return out


def _bands(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, BAND // max(1, matrix.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def _at_most_float32(band: Tensor) -> Tensor:
    """The band in a dtype whose product with float32 is float32."""
    return band.float() if band.dtype == torch.float64 else band


def _divide(wide: Tensor, scale: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Write wide / scale, rounded to `dtype`, to `out`, in one pass over memory where that is possible."""
    if dtype in (out.dtype, torch.float32, torch.float64):
        torch.div(wide, scale, out=out)
    else:
        out.copy_(wide.div_(scale).to(dtype))


@jit
def _rounded(value, LARGEST: tl.constexpr):
    """To the nearest integer, halves to even, with the sign of zeros; at most LARGEST in magnitude. NaN stays
    NaN.
    """
    magnitude = tl.abs(value)
    magnitude = tl.where(magnitude > LARGEST, LARGEST, magnitude)
    integer = (magnitude + 8388608.0) - 8388608.0  # 2^23, from which on float32 holds integers only
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    return (integer.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@jit
def _loaded(x, column, columns):
    return tl.load(x + column, column < columns, 0.0).to(tl.float32)


@jit
def _magnitudes(value):
    """The bits of magnitudes, which are ordered as the numbers are, NaN last."""
    return tl.abs(value).to(tl.int32, bitcast=True)


@jit
def _store_rounded(value, scale, x, out, inside, LARGEST: tl.constexpr):
    """T of values of x, rounded to its dtype and to that of the result."""
    value = tl.div_rn(_rounded(value * scale, LARGEST), scale)
    tl.store(out, value.to(x.dtype.element_ty).to(out.dtype.element_ty), inside)


@jit
def _rows_kernel(x, out, stride, columns, SMALLEST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * columns
    place = tl.arange(0, BLOCK)
    value = _loaded(x, place, columns)
    largest = _magnitudes(value)
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            largest = tl.maximum(largest, _magnitudes(_loaded(x, start + place, columns)))
    largest = tl.max(largest, 0).to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    scale = tl.div_rn(1.0, largest) * 127.0  # in torch, too, 127 / x is the product with a reciprocal
    # |x s| is at most 127, but for a rounding: the limit of -128 is never reached.
    _store_rounded(value, scale, x, out + place, place < columns, 127.0)
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            column = start + place
            _store_rounded(_loaded(x, column, columns), scale, x, out + column, column < columns, 127.0)


@jit
def _values_kernel(weight, out, scale, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _loaded(weight, index, count)
    _store_rounded(value, tl.load(scale), weight, out + index, index < count, 1.0)
