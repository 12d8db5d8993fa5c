"""Quantisation of a matrix to float8 (Micikevicius et al., 2022, arXiv:2209.05433), by rows and by columns.

    s_i = 2^ceil(log2(max_j |x_ij| / largest)),   q_ij = float8(x_ij / s_i)      largest: of the float8 dtype

A matrix product needs operands whose scales do not vary along the dimension that is summed over. One matrix
is therefore quantised by rows for one product and by columns, transposed, for another. With scales that are
powers of two, division by them is exact, and so is a product of two: all the error is in the rounding to
float8, at most 2^-4 of a normal value in e4m3 and 2^-3 in e5m2.

Minimum traffic for N elements of b bytes: by rows N (b + 1), as a row stays in registers; by columns or both,
N b to find the scales, and N (b + 1) for one copy or N (b + 2) for both.

The columns of a matrix can also be quantised from its copy by rows, in half the traffic (`quantize_columns`,
`turned`): multiplied by powers of two, float8 numbers stay what they are, unless they become subnormal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl, use_triton
from liger_models.kernels._gpu import gpu_of

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
ALIGNMENT = 16  # of the dimension that a float8 product sums over
BLOCK = 256  # rows and columns of a block in which magnitudes are compared, a few rows at a time
TILE = 128  # rows and columns of a tile that is cast
WIDEST = 32768  # elements of a row that fits in registers
SMALLEST_SCALE = 2.0**-126  # the inverse of a smaller one overflows


class Float8(NamedTuple):
    """A quantised matrix: `values * scales`.

    Attributes:
        values: [rows, columns] float8, contiguous.
        scales: float32, powers of two: [rows, 1], or [1, 1] for one scale.
    """

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """[rows, columns] float32."""
        return self.values.float() * self.scales


def quantize(
    x: Tensor,
    *,
    by_rows: bool = True,
    by_columns: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    one_scale: bool = False,
    largest: Tensor | None = None,
) -> tuple[Float8 | None, Float8 | None]:
    """Quantise a matrix by rows, by columns, or both, reading it twice.

    Args:
        x: [R, C] floating dtype, any strides.
        by_rows, by_columns: the copies to make.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        one_scale: one scale for the whole matrix instead of one for each row or column.
        largest: float32 of one element: with `one_scale`, the largest magnitude, of x or of a matrix of which
            x is a part; NaN if one is not finite. x is then read once.

    Returns:
        The copy by rows, [R, C], and the copy by columns, transposed: [C, R'], where R' is R rounded up to a
        multiple of 16 with zeros, as a sum over rows needs it. A matrix with an infinity or a NaN gives NaN
        in its row and column. Not differentiable.

    Raises:
        ValueError: x is not a matrix, or not this dtype.
    """
    if x.dim() != 2 or dtype not in DTYPES:
        raise ValueError(
            f"found {tuple(x.shape)} to quantise to {dtype}; expected a matrix and a float8 dtype"
        )
    x = x.detach()
    if not casts_to_float8(x) or not x.numel():
        return quantize_plain(x, by_rows, by_columns, dtype, one_scale, largest)
    if by_rows and not by_columns and not one_scale and x.stride(1) == 1 and x.shape[1] <= WIDEST:
        return _rows_at_once(x, dtype), None
    return _quantize(x, None, by_rows, by_columns, dtype, one_scale, largest)


def casts_to_float8(x: Tensor) -> bool:
    """Whether a kernel runs for x, on a GPU on which Triton has e4m3: NVIDIA's from Ada on."""
    return use_triton(x) and gpu_of(x).capability >= (8, 9)


def quantize_columns(rows: Tensor, factors: Tensor) -> Float8:
    """Quantise a matrix by columns, given its rows in e4m3.

    Args:
        rows: [R, C] float8_e4m3fn, contiguous.
        factors: [R, 1] float32, one for each row; with powers of two numbers are rounded only if they become
            subnormal.

    Returns:
        `rows * factors` by columns, transposed: [C, R'], as from `quantize`.
    """
    if casts_to_float8(factors) and rows.numel():
        columns = _quantize(rows, factors, False, True, rows.dtype, False)[1]
    else:
        columns = quantize_plain(rows.float() * factors, False, True, rows.dtype, False)[1]
    assert columns is not None
    return columns


def turned(rows: Float8) -> Float8:
    """Transpose a copy by rows, without its scales, which become one.

    Returns:
        [C, R'] of a copy [R, C], where R' is R rounded up to a multiple of 16 with zeros.
    """
    (count, columns), padded = rows.values.shape, ceil_div(len(rows.values), ALIGNMENT) * ALIGNMENT
    values = rows.values.new_empty((columns, padded))
    source, target = rows.values.view(torch.uint8), values.view(torch.uint8)
    if use_triton(rows.scales) and values.numel():
        with on_device_of(values):
            _turn_kernel[(ceil_div(padded, TILE), ceil_div(columns, TILE))](
                source, target, count, columns, padded, TILE=TILE, num_warps=8
            )
    else:
        target.copy_(torch.nn.functional.pad(source.T, (0, padded - count)))
    return Float8(values, rows.scales.new_ones((columns, 1)))


def quantize_plain(
    x: Tensor,
    by_rows: bool,
    by_columns: bool,
    dtype: torch.dtype,
    one_scale: bool,
    largest: Tensor | None = None,
) -> tuple[Float8 | None, Float8 | None]:
    """Plain twin of `quantize`."""
    wide = x.float()
    rows = rows_plain(wide, dtype, one_scale, largest) if by_rows else None
    if not by_columns:
        return rows, None
    padded = torch.nn.functional.pad(wide.T, (0, -len(x) % ALIGNMENT))
    return rows, rows_plain(padded, dtype, one_scale, largest)


def rows_plain(
    wide: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    one_scale: bool = False,
    largest: Tensor | None = None,
) -> Float8:
    """Quantise a float32 matrix by rows."""
    magnitudes = wide.abs()
    if largest is not None:
        largest = largest.view(1, 1)
    elif not wide.numel():
        largest = wide.new_zeros(1 if one_scale else len(wide), 1)
    elif one_scale:
        largest = magnitudes.amax().view(1, 1)
    else:
        largest = magnitudes.amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(largest / torch.finfo(dtype).max)  # mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    scales = torch.ldexp(torch.ones_like(largest), exponent).clamp(min=SMALLEST_SCALE)
    scales = torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scales, torch.nan))
    return Float8((wide / scales).to(dtype), scales)


def _rows_at_once(x: Tensor, dtype: torch.dtype) -> Float8:
    rows, columns = x.shape
    result = _empty(x, rows, columns, rows, dtype)
    block_width = next_power_of_2(columns)
    block_rows = max(1, 4096 // block_width)
    with on_device_of(x):
        _rows_kernel[(ceil_div(rows, block_rows),)](
            *(x, *result, x.stride(0), rows, columns),
            LARGEST=torch.finfo(dtype).max,
            BLOCK_ROWS=block_rows,
            BLOCK_WIDTH=block_width,
            num_warps=min(16, max(4, block_rows * block_width // 512)),
        )
    return result


def _quantize(
    x: Tensor,
    factors: Tensor | None,
    by_rows: bool,
    by_columns: bool,
    dtype: torch.dtype,
    one_scale: bool,
    largest: Tensor | None = None,
) -> tuple[Float8 | None, Float8 | None]:
    rows, columns = x.shape
    block = BLOCK if factors is None else 2 * BLOCK  # of one byte an element; both measured on an H100
    grid = ceil_div(rows, block), ceil_div(columns, block)
    with on_device_of(x):
        if largest is not None:
            largest_across = largest_down = largest.view(1)
        else:
            across = x.new_empty((grid[1], rows), dtype=torch.float32) if by_rows or one_scale else x
            down = x.new_empty((grid[0], columns), dtype=torch.float32) if by_columns and not one_scale else x
            _magnitudes_kernel[grid](
                *(x, factors, across, down, *x.stride(), rows, columns),
                ACROSS=across is not x,
                DOWN=down is not x,
                BLOCK=block,
                STEP=32,
                num_warps=8,
            )
            largest_across = (
                (across.amax().view(1) if one_scale else across.amax(0)) if across is not x else x
            )
            largest_down = largest_across if one_scale else (down.amax(0) if by_columns else x)
        padded = ceil_div(rows, ALIGNMENT) * ALIGNMENT
        height = 1 if one_scale else rows
        plain = _empty(x, rows, columns, height, dtype) if by_rows else None
        height = 1 if one_scale else columns
        turned = _empty(x, columns, padded, height, dtype) if by_columns else None
        nothing = x, x
        _cast_kernel[(ceil_div(padded, TILE), ceil_div(columns, TILE))](
            *(x, factors, largest_across, largest_down, *(plain or nothing), *(turned or nothing)),
            *(*x.stride(), rows, columns, padded),
            LARGEST=torch.finfo(dtype).max,
            BY_ROWS=by_rows,
            BY_COLUMNS=by_columns,
            ONE_SCALE=one_scale,
            TILE=TILE,
            num_warps=8,
        )
    return plain, turned


def empty_rows(x: Tensor) -> Float8:
    """Memory for x [R, C] in e4m3 by rows."""
    rows, columns = x.shape
    return _empty(x, rows, columns, rows, torch.float8_e4m3fn)


def _empty(x: Tensor, rows: int, columns: int, scales: int, dtype: torch.dtype) -> Float8:
    return Float8(x.new_empty((rows, columns), dtype=dtype), x.new_empty((scales, 1), dtype=torch.float32))


@jit
def _rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    row_stride,
    rows,
    columns,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1, keep_dims=True)
    scale = scale_for(as_magnitude(bits), LARGEST)
    tl.store(scales_ptr + row, scale, mask=row < rows)
    q = (x * (1.0 / scale)).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * columns + column, q, mask=inside)


@jit
def _turn_kernel(x_ptr, turned_ptr, rows, columns, padded, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0)
    target = turned_ptr + column[:, None] * padded + row[None, :]
    tl.store(target, tl.trans(x), mask=(column < columns)[:, None] & (row < padded)[None, :])


@jit
def _magnitudes_kernel(
    x_ptr,
    factors_ptr,  # of each row, or None
    across_ptr,  # [blocks of columns, rows]
    down_ptr,  # [blocks of rows, columns]
    row_stride,
    column_stride,
    rows,
    columns,
    ACROSS: tl.constexpr,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The largest magnitude of each row and of each column of a block; NaN if one is not finite."""
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    highest = tl.zeros([STEP, BLOCK], dtype=tl.int32)
    for start in range(0, BLOCK, STEP):
        row = tl.program_id(0).to(tl.int64) * BLOCK + start + tl.arange(0, STEP)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        pointers = x_ptr + row[:, None] * row_stride + column[None, :] * column_stride
        # The bits of magnitudes are ordered as they are, with infinity and NaN above all others.
        x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        if factors_ptr is not None:
            x *= tl.load(factors_ptr + row, mask=row < rows, other=0.0)[:, None]
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        if ACROSS:
            target = across_ptr + tl.program_id(1).to(tl.int64) * rows + row
            tl.store(target, as_magnitude(tl.max(bits, 1)), mask=row < rows)
        highest = tl.maximum(highest, bits)
    if DOWN:
        target = down_ptr + tl.program_id(0).to(tl.int64) * columns + column
        tl.store(target, as_magnitude(tl.max(highest, 0)), mask=column < columns)


@jit
def as_magnitude(bits):
    """A float from its bits, with NaN for infinity."""
    return tl.where(bits >= 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def _cast_kernel(
    x_ptr,
    factors_ptr,  # of each row, or None
    across_ptr,  # largest magnitude of each row, or of all
    down_ptr,  # of each column, or of all
    values_ptr,  # [rows, columns]
    scales_ptr,  # [rows]
    turned_ptr,  # [columns, padded]
    turned_scales_ptr,  # [columns]
    row_stride,
    column_stride,
    rows,
    columns,
    padded,
    LARGEST: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if factors_ptr is not None:
        x *= tl.load(factors_ptr + row, mask=row < rows, other=0.0)[:, None]
    if BY_ROWS:
        if ONE_SCALE:
            scale = scale_for(tl.load(across_ptr + 0 * row), LARGEST)
        else:
            scale = scale_for(tl.load(across_ptr + row, mask=row < rows, other=0.0), LARGEST)
        first = (row < 1) if ONE_SCALE else (row < rows)
        tl.store(scales_ptr + row, scale, mask=first & (tl.program_id(1) == 0))
        q = (x * (1.0 / scale)[:, None]).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * columns + column[None, :], q, mask=inside)
    if BY_COLUMNS:
        if ONE_SCALE:
            scale = scale_for(tl.load(down_ptr + 0 * column), LARGEST)
        else:
            scale = scale_for(tl.load(down_ptr + column, mask=column < columns, other=0.0), LARGEST)
        first = (column < 1) if ONE_SCALE else (column < columns)
        tl.store(turned_scales_ptr + column, scale, mask=first & (tl.program_id(0) == 0))
        q = tl.trans((x * (1.0 / scale)[None, :]).to(turned_ptr.dtype.element_ty))
        target = turned_ptr + column[:, None] * padded + row[None, :]
        tl.store(target, q, mask=(column < columns)[:, None] & (row < padded)[None, :])


@jit
def scale_for(largest, LARGEST: tl.constexpr):
    """The smallest power of two by which a magnitude is at most LARGEST; 1 for zero, NaN for NaN."""
    bits = tl.math.div_rn(largest, LARGEST).to(tl.int32, bitcast=True)
    up = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    up = tl.maximum(up, 1.1754943508222875e-38)
    up = tl.where(largest == 0.0, 1.0, up)
    return tl.where(largest != largest, largest, up)
