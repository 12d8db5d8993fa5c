"""Kernels of RMSNorm and LayerNorm, which differ only in whether the mean is subtracted.

    n = (x - mean) / sqrt(mean((x - mean)^2) + eps)         (RMSNorm: mean = 0)
    y = n * (offset + weight) + bias

    g       = dy * (offset + weight)
    dx      = (g - n * mean(g * n) - mean(g)) * rstd        (RMSNorm: without mean(g))
    dweight = sum over rows of dy * n,  dbias = sum over rows of dy

Minimum traffic, for rows of H elements of b bytes: forward 2 H b per row (4 H b with the residual add),
backward 3 H b per row (4 H b with the residual's gradient).

A row of up to `MAX_BLOCK_WIDTH` elements (half as many in LayerNorm's backward pass) stays in registers. A
program of the forward kernel processes a few rows; in the backward kernel a fixed number of programs stride
over all rows, each with its own sums for dweight and dbias, which a second kernel adds up in a fixed order,
so that gradients are deterministic. Wider rows are read in blocks, once for every sum they need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_rows,
    ceil_div,
    contiguous_like,
    early_start,
    jit,
    next_power_of_2,
    num_sms,
    on_device_of,
    shared_memory,
    tl,
    wait_for_inputs,
)
from liger_models.kernels.float8.quantize import Float8, as_magnitude, scale_for
from liger_models.kernels.norms._norm_sums import column_sum, rstd_of
from liger_models.kernels.norms._wide_norm_kernels import (
    wide_backward_kernel,
    wide_forward_kernel,
    wide_sums_kernel,
)

MAX_BLOCK_WIDTH = 16384

# No fused multiply-add in the backward pass: a norm's gradient is rounded before the residual's is added. In
# float32 the sum then has the bits that autograd computes for separate add and norm operations.
_ROUND_PRODUCTS = {"enable_fp_fusion": False}


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    *,
    center: bool,
    round_first: bool,
    float8: Float8 | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Normalise x, or x + residual.

    `center` subtracts the mean (LayerNorm). `round_first` rounds n to the input's dtype before multiplying by
    the weight; the product has the dtype to which PyTorch promotes them. `float8` is memory for y in e4m3 by
    rows, for rows of at most `MAX_BLOCK_WIDTH`.

    Returns y [..., H], x + residual [..., H] or None, mean [rows] float32 or None, rstd [rows] float32.
    """
    total_dtype = x.dtype
    if residual is not None and residual.dtype != total_dtype:
        total_dtype = torch.promote_types(total_dtype, residual.dtype)
    y_dtype = total_dtype
    if round_first and weight is not None and weight.dtype != total_dtype:
        y_dtype = torch.promote_types(total_dtype, weight.dtype)
    y = contiguous_like(x, y_dtype)
    total = None if residual is None else contiguous_like(y, total_dtype)
    x_rows = as_rows(x)
    residual_rows = None if residual is None else as_rows(residual)
    rows, width = x_rows.shape
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if center else None
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y, total, mean, rstd

    block_width = next_power_of_2(width)
    if block_width <= MAX_BLOCK_WIDTH:
        kernel = _forward_kernel
        block_rows, num_warps = _forward_config(block_width, center)
        copy: tuple[Tensor | None, ...] = float8 or (None, None)
    else:
        kernel, block_rows, block_width, num_warps = wide_forward_kernel, 1, 8192, 16
        copy = ()
    with on_device_of(x):
        kernel[(ceil_div(rows, block_rows),)](
            x_rows,
            residual_rows,
            weight,
            bias,
            y,
            total,
            mean,
            rstd,
            *copy,
            x_rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            rows,
            width,
            eps,
            offset,
            ROUND_FIRST=round_first,
            BLOCK_ROWS=block_rows,
            BLOCK_WIDTH=block_width,
            num_warps=num_warps,
            **early_start(x),
        )
    return y, total, mean, rstd


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    *,
    round_first: bool,
    want_dweight: bool,
    dbias_dtype: torch.dtype | None = None,
    float8: Float8 | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (plus `dtotal`, the gradient that reaches x through the residual), weight and bias.

    x is the normalised tensor: after a residual add, the sum. `float8` is memory for the gradient of x in
    e4m3 by rows, for rows of at most `MAX_BLOCK_WIDTH` (of a LayerNorm, half of it).
    """
    dx = contiguous_like(x)
    x_rows, dy_rows = as_rows(x), as_rows(dy)
    dtotal_rows = None if dtotal is None else as_rows(dtotal)
    rows, width = x_rows.shape
    dweight = torch.empty_like(weight) if want_dweight and weight is not None else None
    dbias = None if dbias_dtype is None else x.new_empty(width, dtype=dbias_dtype)
    if dx.numel() == 0:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        return dx, dweight, dbias

    block_width = next_power_of_2(width)
    # LayerNorm keeps one more sum in registers, so its limit on the width is lower.
    wide = block_width > (MAX_BLOCK_WIDTH if mean is None else MAX_BLOCK_WIDTH // 2)
    if wide:
        programs = min(64, ceil_div(rows, 16))  # for the kernel that sums over rows
    else:
        block_rows, num_warps, stages, programs_per_sm = _backward_config(block_width)
        element_sizes = sum(t.element_size() for t in (dy, dtotal, x) if t is not None)
        # 16 bytes per row for mean and rstd, which are pipelined too: narrow rows are many.
        if block_rows * (block_width * element_sizes + 16) * (stages - 1) > shared_memory(x) - 1024:
            stages = 1  # float32 on a GPU with less shared memory than Hopper: no pipelining
        programs = min(ceil_div(rows, block_rows), num_sms(x) * programs_per_sm)
    gradients = [gradient for gradient in (dweight, dbias) if gradient is not None]
    sums = rstd.new_empty(len(gradients), programs, width) if gradients else None
    dweight_sums = None if sums is None or dweight is None else sums[0]
    dbias_sums = None if sums is None or dbias is None else sums[-1]
    inputs = (dy_rows, dtotal_rows, x_rows, weight, mean, rstd)
    strides = (dy_rows.stride(0), 0 if dtotal_rows is None else dtotal_rows.stride(0), x_rows.stride(0))
    early = early_start(x)
    with on_device_of(x):
        if not wide:
            _backward_kernel[(programs,)](
                *inputs,
                dx,
                *(float8 or (None, None)),
                dweight_sums,
                dbias_sums,
                *strides,
                rows,
                width,
                offset,
                ROUND_FIRST=round_first,
                BLOCK_ROWS=block_rows,
                BLOCK_WIDTH=block_width,
                STAGES=stages,
                num_warps=num_warps,
                **early,
                **_ROUND_PRODUCTS,
            )
        else:
            wide_backward_kernel[(rows,)](
                *inputs,
                dx,
                *strides,
                width,
                offset,
                BLOCK_WIDTH=8192,
                num_warps=16,
                **early,
                **_ROUND_PRODUCTS,
            )
            if dweight is not None or dbias is not None:
                wide_sums_kernel[(ceil_div(width, 512), programs)](
                    *inputs,
                    dweight_sums,
                    dbias_sums,
                    *strides,
                    rows,
                    width,
                    ROUND_FIRST=round_first,
                    BLOCK_ROWS=4,
                    BLOCK_WIDTH=512,
                    num_warps=4,
                    **early,
                )
        if sums is not None:
            column_sum(sums, *gradients)
    return dx, dweight, dbias


def _forward_config(block_width: int, center: bool) -> tuple[int, int]:
    """Rows per program, and warps: 16 elements a thread for RMSNorm of medium width, else 32. Measured on an
    H200, as is the backward pass's.
    """
    block_rows = max(1, 2048 // block_width)
    elements = 16 if not center and 1024 <= block_width <= 4096 else 32
    return block_rows, min(16, max(1, block_rows * block_width // (32 * elements)))


def _backward_config(block_width: int) -> tuple[int, int, int, int]:
    """Rows per tile, warps, pipeline stages of loads, and programs per multiprocessor.

    The limit is registers: with 128 per thread, 512 threads fit a multiprocessor.
    """
    if block_width <= 4096:
        return 4096 // block_width, 4 if block_width <= 1024 else 8, 3, 2
    return (1, 16, 3, 1) if block_width <= 8192 else (1, 16, 1, 1)


@jit
def _forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    float8_values,
    float8_scales,
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
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (row < rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if residual is not None:
        dtype = total.dtype.element_ty
        value += tl.load(residual + row * residual_stride + column, mask, 0.0).to(tl.float32)
        # Normalise the sum as rounded for the caller, so that rms_norm(total) gives the same bits.
        value = value.to(dtype)
        tl.store(total + row * width + column, value, mask)
        value = value.to(tl.float32)
    if mean is not None:
        row_mean = tl.sum(value, 1, keep_dims=True) / width
        tl.store(mean + row, row_mean, row < rows)
        value = tl.where(column < width, value - row_mean, 0.0)
    row_rstd = rstd_of(tl.sum(value * value, 1, keep_dims=True), width, eps)
    tl.store(rstd + row, row_rstd, row < rows)
    value = value * row_rstd
    if ROUND_FIRST:
        value = value.to(dtype).to(tl.float32)
    if weight is not None:
        value *= tl.load(weight + column, column < width, 0.0).to(tl.float32) + offset
    if bias is not None:
        value += tl.load(bias + column, column < width, 0.0).to(tl.float32)
    value = value.to(y.dtype.element_ty)
    tl.store(y + row * width + column, value, mask)
    if float8_values is not None:
        # Read back: of a value in registers the compiler may compute a second version in another layout, with
        # sums in another order.
        tl.debug_barrier()  # this thread reads values that other threads wrote
        value = tl.load(y + row * width + column, mask, 0.0)
        _store_rows(value, float8_values, float8_scales, row, column, rows, width)


@jit
def _store_rows(x, values, scales, row, column, rows, width):
    """Quantise whole rows to e4m3."""
    mask = (row < rows) & (column < width)
    x = tl.where(mask, x.to(tl.float32), 0.0)
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    scale = scale_for(as_magnitude(tl.max(bits, 1, keep_dims=True)), 448.0)
    tl.store(scales + row, scale, row < rows)
    tl.store(values + row * width + column, (x * (1.0 / scale)).to(values.dtype.element_ty), mask)


@jit
def _backward_kernel(
    dy,
    dtotal,
    x,
    weight,
    mean,
    rstd,
    dx,
    float8_values,
    float8_scales,
    dweight_sums,
    dbias_sums,
    dy_stride,
    dtotal_stride,
    x_stride,
    rows,
    width,
    offset,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    if weight is not None:
        scale = tl.load(weight + column, column < width, 0.0).to(tl.float32) + offset
    if dweight_sums is not None:
        dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    if dbias_sums is not None:
        dbias = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & (column < width)
        n = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
        gradient = tl.load(dy + row * dy_stride + column, mask, 0.0).to(tl.float32)
        row_rstd = tl.load(rstd + row, row < rows, 0.0)
        if mean is not None:
            n = tl.where(column < width, n - tl.load(mean + row, row < rows, 0.0), 0.0)
        n = n * row_rstd
        if dweight_sums is not None:
            if ROUND_FIRST:
                dweight += gradient * n.to(x.dtype.element_ty).to(tl.float32)
            else:
                dweight += gradient * n
        if dbias_sums is not None:
            dbias += gradient
        if weight is not None:
            gradient = gradient * scale
        result = gradient - n * (tl.sum(gradient * n, 1, keep_dims=True) / width)
        if mean is not None:
            result -= tl.sum(gradient, 1, keep_dims=True) / width
        result = result * row_rstd
        if dtotal is not None:
            result += tl.load(dtotal + row * dtotal_stride + column, mask, 0.0).to(tl.float32)
        result = result.to(dx.dtype.element_ty)
        tl.store(dx + row * width + column, result, mask)
        if float8_values is not None:
            _store_rows(result, float8_values, float8_scales, row, column, rows, width)
    sums = tl.program_id(0).to(tl.int64) * width + column
    if dweight_sums is not None:
        tl.store(dweight_sums + sums, tl.sum(dweight, 0, keep_dims=True), column < width)
    if dbias_sums is not None:
        tl.store(dbias_sums + sums, tl.sum(dbias, 0, keep_dims=True), column < width)
