"""Softmax.

    y_c = exp(x_c) / sum_k exp(x_k),   dx_c = y_c (dy_c - sum_k dy_k y_k)

The fewest bytes that must move: the forward reads x and writes y, the backward reads y and dy and writes
dx. A row too wide for a program's registers is read a second time.

One pass for the maximum and the sum: Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    as_rows,
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
    use_triton,
)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The softmax over a dimension, in x's dtype, from sums in float32 (float64 for float64).

    x of any shape with at least one dimension, any floating dtype. A row of nothing but -inf gives nan, as in
    torch. Another dimension than the last costs a copy. Raises TypeError for integers, IndexError for a
    dimension that x does not have.
    """
    if not use_triton(x):
        return softmax_plain(x, dim)
    if dim in (-1, x.dim() - 1):
        return _Softmax.apply(x)
    return _Softmax.apply(x.movedim(dim, -1)).movedim(-1, dim)


def softmax_plain(x: Tensor, dim: int = -1) -> Tensor:
    """The plain twin of `softmax`."""
    return torch.softmax(at_least_float32(x), dim).to(x.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch(_forward_kernel, y, as_rows(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        _launch(_backward_kernel, dx, as_rows(dy), y)
        return dx


def _launch(kernel, out, strided, *contiguous):
    rows, width = strided.shape
    if not out.numel():
        return
    lanes = min(next_power_of_2(width), _MOST_LANES)
    rows_a_program = max(1, _LEAST_ELEMENTS // lanes)
    with on_device_of(out):
        kernel[(ceil_div(rows, rows_a_program),)](
            out,
            strided,
            *contiguous,
            strided.stride(0),
            rows,
            width,
            WHOLE=width <= lanes,
            ROWS=rows_a_program,
            LANES=lanes,
            num_warps=min(32, max(1, rows_a_program * lanes // 512)),
        )


# 16 elements a thread spill no register. With 32 warps a program, so few wider rows are in flight that the L2
# cache still holds them when they are read again.
_MOST_LANES = 16384
_LEAST_ELEMENTS = 1024  # that a program takes, so that narrow rows share one


@jit
def _tile(start, rows, width, ROWS, LANES):
    """Row numbers [ROWS, 1], columns [1, LANES], and which of their elements exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = start + tl.arange(0, LANES)[None, :]
    return row, columns, (row < rows) & (columns < width)


@jit
def _forward_kernel(
    y_ptr,
    x_ptr,
    x_stride,
    rows,
    width,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    if WHOLE:
        row, columns, exists = _tile(0, rows, width, ROWS, LANES)
        x = tl.load(x_ptr + row * x_stride + columns, mask=exists, other=-float("inf")).to(tl.float32)
        # Rows that do not exist must not make a nan of -inf - -inf.
        largest = tl.where(row < rows, tl.max(x, 1)[:, None], 0.0)
        e = tl.exp(x - largest)
        y = tl.div_rn(e, tl.sum(e, 1)[:, None])
        tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=exists)
    else:
        # Each lane keeps its own maximum and sum, so that no thread waits for another before the row's end.
        maximum = tl.full([ROWS, LANES], -float("inf"), tl.float32)
        total = tl.zeros([ROWS, LANES], tl.float32)
        for start in range(0, width, LANES):
            row, columns, exists = _tile(start, rows, width, ROWS, LANES)
            x = tl.load(x_ptr + row * x_stride + columns, mask=exists, other=-float("inf")).to(tl.float32)
            larger = tl.maximum(maximum, x)
            # While every element so far is -inf, subtract zero: exp(-inf - -inf) would be nan.
            shift = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(maximum - shift) + tl.exp(x - shift)
            maximum = larger
        largest = tl.max(maximum, 1)[:, None]
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        total = tl.sum(total * tl.exp(maximum - shift), 1)[:, None]
        for start in range(0, width, LANES):
            row, columns, exists = _tile(start, rows, width, ROWS, LANES)
            x = tl.load(x_ptr + row * x_stride + columns, mask=exists, other=0.0).to(tl.float32)
            y = tl.div_rn(tl.exp(x - largest), total)
            tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=exists)


@jit
def _backward_kernel(
    dx_ptr,
    dy_ptr,
    y_ptr,
    dy_stride,
    rows,
    width,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    if WHOLE:
        row, columns, exists = _tile(0, rows, width, ROWS, LANES)
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=exists, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * width + columns, mask=exists, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(dy * y, 1)[:, None])
        tl.store(dx_ptr + row * width + columns, dx.to(dx_ptr.dtype.element_ty), mask=exists)
    else:
        product = tl.zeros([ROWS, LANES], tl.float32)
        for start in range(0, width, LANES):
            row, columns, exists = _tile(start, rows, width, ROWS, LANES)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=exists, other=0.0).to(tl.float32)
            product += dy * tl.load(y_ptr + row * width + columns, mask=exists, other=0.0).to(tl.float32)
        total = tl.sum(product, 1)[:, None]
        for start in range(0, width, LANES):
            row, columns, exists = _tile(start, rows, width, ROWS, LANES)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=exists, other=0.0).to(tl.float32)
            y = tl.load(y_ptr + row * width + columns, mask=exists, other=0.0).to(tl.float32)
            tl.store(
                dx_ptr + row * width + columns, (y * (dy - total)).to(dx_ptr.dtype.element_ty), mask=exists
            )
