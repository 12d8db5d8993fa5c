"""Kernels of `_norm_kernels.py` for rows too wide for registers, which are read in blocks."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl, wait_for_inputs
from liger_models.kernels.norms._norm_sums import rstd_of


@jit
def wide_forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    x_stride,
    residual_stride,
    rows,
    width,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_WIDTH)
    source = x + row * x_stride
    dtype = x.dtype.element_ty
    if residual is not None:
        source = total + row * width
        dtype = total.dtype.element_ty
        for start in range(0, width, BLOCK_WIDTH):
            column = start + block
            value = tl.load(x + row * x_stride + column, column < width, 0.0).to(tl.float32)
            value += tl.load(residual + row * residual_stride + column, column < width, 0.0).to(tl.float32)
            tl.store(total + row * width + column, value.to(dtype), column < width)
        tl.debug_barrier()  # the sum is read by other threads than wrote it
    row_mean = 0.0
    if mean is not None:
        accumulated = tl.zeros([BLOCK_WIDTH], tl.float32)
        for start in range(0, width, BLOCK_WIDTH):
            column = start + block
            accumulated += tl.load(source + column, column < width, 0.0).to(tl.float32)
        row_mean = tl.sum(accumulated, 0) / width
        tl.store(mean + row, row_mean)
    accumulated = tl.zeros([BLOCK_WIDTH], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + block
        value = tl.load(source + column, column < width, 0.0).to(tl.float32)
        value = tl.where(column < width, value - row_mean, 0.0)
        accumulated += value * value
    row_rstd = rstd_of(tl.sum(accumulated, 0), width, eps)
    tl.store(rstd + row, row_rstd)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + block
        value = (tl.load(source + column, column < width, 0.0).to(tl.float32) - row_mean) * row_rstd
        if ROUND_FIRST:
            value = value.to(dtype).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + offset
        if bias is not None:
            value += tl.load(bias + column, column < width, 0.0).to(tl.float32)
        tl.store(y + row * width + column, value.to(y.dtype.element_ty), column < width)


@jit
def wide_backward_kernel(
    dy,
    dtotal,
    x,
    weight,
    mean,
    rstd,
    dx,
    dy_stride,
    dtotal_stride,
    x_stride,
    width,
    offset,
    BLOCK_WIDTH: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_WIDTH)
    row_rstd = tl.load(rstd + row)
    row_mean = 0.0
    if mean is not None:
        row_mean = tl.load(mean + row)
    products = tl.zeros([BLOCK_WIDTH], tl.float32)
    gradients = tl.zeros([BLOCK_WIDTH], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + block
        gradient = tl.load(dy + row * dy_stride + column, column < width, 0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + offset
        n = (tl.load(x + row * x_stride + column, column < width, 0.0).to(tl.float32) - row_mean) * row_rstd
        products += gradient * n  # past the width the gradient is zero
        gradients += gradient
    mean_product = tl.sum(products, 0) / width
    mean_gradient = 0.0
    if mean is not None:
        mean_gradient = tl.sum(gradients, 0) / width
    for start in range(0, width, BLOCK_WIDTH):
        column = start + block
        gradient = tl.load(dy + row * dy_stride + column, column < width, 0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + offset
        n = (tl.load(x + row * x_stride + column, column < width, 0.0).to(tl.float32) - row_mean) * row_rstd
        result = (gradient - n * mean_product - mean_gradient) * row_rstd
        if dtotal is not None:
            result += tl.load(dtotal + row * dtotal_stride + column, column < width, 0.0).to(tl.float32)
        tl.store(dx + row * width + column, result.to(dx.dtype.element_ty), column < width)


@jit
def wide_sums_kernel(
    dy,
    dtotal,
    x,
    weight,
    mean,
    rstd,
    dweight_sums,
    dbias_sums,
    dy_stride,
    dtotal_stride,
    x_stride,
    rows,
    width,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(1)):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & (column < width)
        n = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
        if mean is not None:
            n -= tl.load(mean + row, row < rows, 0.0)
        n = n * tl.load(rstd + row, row < rows, 0.0)
        if ROUND_FIRST:
            n = n.to(x.dtype.element_ty).to(tl.float32)
        gradient = tl.load(dy + row * dy_stride + column, mask, 0.0).to(tl.float32)
        dweight += gradient * n
        dbias += gradient
    sums = tl.program_id(1).to(tl.int64) * width + column
    if dweight_sums is not None:
        tl.store(dweight_sums + sums, tl.sum(dweight, 0, keep_dims=True), column < width)
    if dbias_sums is not None:
        tl.store(dbias_sums + sums, tl.sum(dbias, 0, keep_dims=True), column < width)
