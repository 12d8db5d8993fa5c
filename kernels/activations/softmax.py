"""Softmax.

    y_c = exp(x_c) / sum_k exp(x_k),   dx_c = y_c (dy_c - sum_k dy_k y_k)

Minimum traffic: the forward reads x and writes y; the backward reads y and dy and writes dx. A row too wide
for a program's registers is read twice, the second time from the L2 cache where it fits.

Maximum and sum come from one pass: Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    ceil_div,
    contiguous_like,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)
from liger_models.kernels.losses._logit_tiles import fit_tile, load_columns


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax over a dimension, in x's dtype, with sums in float32 (float64 for float64).

    x has any floating dtype and at least one dimension. A row of only -inf gives nan, as in torch. A
    dimension other than the last costs a copy. Raises TypeError for integers, IndexError for a dimension that
    x does not have.
    """
    if x.dim() == 0:
        raise IndexError("x has no dimensions; softmax needs at least one")
    if not use_triton(x):
        return as_once_differentiable(softmax_plain(x, dim))
    if dim in (-1, x.dim() - 1):
        return _Softmax.apply(x)
    return _Softmax.apply(x.movedim(dim, -1)).movedim(-1, dim)


def softmax_plain(x: Tensor, dim: int = -1) -> Tensor:
    """Plain twin of `softmax`."""
    return torch.softmax(at_least_float32(x), dim).to(x.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = contiguous_like(x)
        _launch(_forward_kernel, _wide_forward_kernel, _FORWARD_TILE, y, as_rows(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        _launch(_backward_kernel, _wide_backward_kernel, _BACKWARD_TILE, dx, as_rows(dy), y)
        return dx


def _launch(kernel, wide_kernel, wide_tile, out, strided, *contiguous):
    rows, width = strided.shape
    if not out.numel():
        return
    arguments = out, strided, *contiguous, strided.stride(0)
    with on_device_of(out):
        if width > _WIDEST_WHOLE:
            lanes, depth = fit_tile(width, wide_tile)
            num_warps = max(1, lanes // 256)  # a thread loads 16 bytes of half precision at a time
            wide_kernel[(rows,)](*arguments, width, LANES=lanes, DEPTH=depth, num_warps=num_warps)
            return
        lanes = next_power_of_2(width)
        rows_a_program = max(1, _LEAST_ELEMENTS // lanes)
        kernel[(ceil_div(rows, rows_a_program),)](
            *arguments,
            rows,
            width,
            ROWS=rows_a_program,
            LANES=lanes,
            num_warps=min(32, max(1, rows_a_program * lanes // 512)),
        )


_WIDEST_WHOLE = 16384  # elements of a row that a program keeps in registers: 16 a thread, without spills
_LEAST_ELEMENTS = 1024  # per program, so that narrow rows share one
# Lanes and depth for wider rows: the fastest of several on an H200 at width 128,256 in bfloat16. With 32
# warps a multiprocessor works on one or two rows at a time, so the L2 cache can hold them for the second
# read.
_FORWARD_TILE = 8192, 4
_BACKWARD_TILE = 8192, 2


@jit
def _exp(x, EXACT):
    """exp(x) for x <= 0. The hardware's exp2 takes x * log2(e), whose rounding error shows in float32
    results. EXACT restores the lost part as a factor.
    """
    log2_e = 1.4426950408889634
    product = x * log2_e
    e = tl.exp2(product)
    if EXACT:
        # 1.925963033500e-08 is what log2(e) itself loses in float32.
        lost = tl.fma(x, log2_e, -product) + x * 1.925963033500e-08
        e = tl.where(e > 0.0, e + e * (lost * 0.6931471805599453), e)  # lost is nan if x is -inf
    return e


@jit
def _tile(rows, width, ROWS, LANES):
    """Row indices [ROWS, 1], column indices [1, LANES], and the mask of existing elements."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, LANES)[None, :]
    return row, columns, (row < rows) & (columns < width)


@jit
def _forward_kernel(y_ptr, x_ptr, x_stride, rows, width, ROWS: tl.constexpr, LANES: tl.constexpr):
    row, columns, exists = _tile(rows, width, ROWS, LANES)
    x = tl.load(x_ptr + row * x_stride + columns, mask=exists, other=-float("inf")).to(tl.float32)
    # Missing rows must not produce nan from -inf - -inf.
    largest = tl.where(row < rows, tl.max(x, 1)[:, None], 0.0)
    e = _exp(x - largest, x_ptr.dtype.element_ty == tl.float32)
    y = e * tl.div_rn(1.0, tl.sum(e, 1)[:, None])
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=exists)


@jit
def _backward_kernel(dx_ptr, dy_ptr, y_ptr, dy_stride, rows, width, ROWS: tl.constexpr, LANES: tl.constexpr):
    row, columns, exists = _tile(rows, width, ROWS, LANES)
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=exists, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * width + columns, mask=exists, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(dy * y, 1)[:, None])
    tl.store(dx_ptr + row * width + columns, dx.to(dx_ptr.dtype.element_ty), mask=exists)


@jit
def _accumulate(maximum, total, x_ptr, columns, width, MASKED):
    """Accumulate elements [DEPTH, LANES] into each lane's maximum and sum of exponentials."""
    x = load_columns(x_ptr, columns, width, MASKED, -float("inf"))
    larger = tl.maximum(maximum, tl.max(x, 0))
    # While every element so far is -inf, subtract zero: exp(-inf - -inf) would be nan.
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    total = total * _exp(maximum - shift, False) + tl.sum(_exp(x - shift[None, :], False), 0)
    return larger, total


@jit
def _write_softmax(y_ptr, x_ptr, columns, width, largest, inverse, MASKED):
    x = load_columns(x_ptr, columns, width, MASKED, -float("inf"))
    y = (_exp(x - largest, x_ptr.dtype.element_ty == tl.float32) * inverse).to(y_ptr.dtype.element_ty)
    if MASKED:
        tl.store(y_ptr + columns, y, mask=columns < width)
    else:
        tl.store(y_ptr + columns, y)


@jit
def _wide_forward_kernel(y_ptr, x_ptr, x_stride, width, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * width
    x_ptr += row * x_stride
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = width // (DEPTH * LANES) * (DEPTH * LANES)
    # Each lane keeps its own maximum and sum, so that threads synchronise only at the row's end.
    maximum = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, whole, DEPTH * LANES):
        maximum, total = _accumulate(maximum, total, x_ptr, start + tile, width, False)
    if whole < width:
        maximum, total = _accumulate(maximum, total, x_ptr, whole + tile, width, True)
    largest = tl.max(maximum, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    inverse = tl.div_rn(1.0, tl.sum(total * _exp(maximum - shift, False), 0))
    for start in range(0, whole, DEPTH * LANES):
        _write_softmax(y_ptr, x_ptr, start + tile, width, largest, inverse, False)
    if whole < width:
        _write_softmax(y_ptr, x_ptr, whole + tile, width, largest, inverse, True)


@jit
def _write_gradient(dx_ptr, dy_ptr, y_ptr, columns, width, total, MASKED):
    dy = load_columns(dy_ptr, columns, width, MASKED)
    dx = (load_columns(y_ptr, columns, width, MASKED) * (dy - total)).to(dx_ptr.dtype.element_ty)
    if MASKED:
        tl.store(dx_ptr + columns, dx, mask=columns < width)
    else:
        tl.store(dx_ptr + columns, dx)


@jit
def _wide_backward_kernel(dx_ptr, dy_ptr, y_ptr, dy_stride, width, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    dx_ptr += row * width
    dy_ptr += row * dy_stride
    y_ptr += row * width
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = width // (DEPTH * LANES) * (DEPTH * LANES)
    product = tl.zeros([LANES], tl.float32)
    for start in range(0, whole, DEPTH * LANES):
        columns = start + tile
        product += tl.sum(
            load_columns(dy_ptr, columns, width, False) * load_columns(y_ptr, columns, width, False), 0
        )
    if whole < width:
        columns = whole + tile
        product += tl.sum(
            load_columns(dy_ptr, columns, width, True) * load_columns(y_ptr, columns, width, True), 0
        )
    total = tl.sum(product, 0)
    # Backwards: the row's end was read last and is most likely still cached.
    if whole < width:
        _write_gradient(dx_ptr, dy_ptr, y_ptr, whole + tile, width, total, True)
    for done in range(0, whole, DEPTH * LANES):
        start = whole - DEPTH * LANES - done
        _write_gradient(dx_ptr, dy_ptr, y_ptr, start + tile, width, total, False)
