"""Products of `_grouped_products.py` in float8, for experts with many rows.

    C[r] = s_r t_n * (q[r] @ p[e(r)])      q, s: a row of A;  p, t: B[e] by rows, or by columns, transposed

Every operand is quantised to e4m3 for each product, with a power of two as the scale of each row of A, and of
each row, or column, of an expert's matrix (kernels/float8/quantize.py). Rows of A that are gathered by token
are quantised once a token, where an operation before it has not done so (kernels/float8/copies.py).

Minimum traffic for the matrices' N elements in bfloat16: 3 N, by rows as well as by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, on_device_of, once_differentiable, tl
from liger_models.kernels.experts._expert_order import ExpertOrder
from liger_models.kernels.experts._grouped_products import rows_product
from liger_models.kernels.float8.copies import carried_rows
from liger_models.kernels.float8.product import float8_product_plain
from liger_models.kernels.float8.quantize import (
    ALIGNMENT,
    Float8,
    as_magnitude,
    casts_to_float8,
    quantize,
    rows_plain,
    scale_for,
)


def float8_rows_product(
    a: Tensor,
    b: Tensor,
    order: ExpertOrder,
    *,
    transposed: bool,
    gather: bool = False,
    bias: Tensor | None = None,
    path: None = None,
) -> Tensor:
    """`rows_product` of a and b quantised to e4m3; the inner dimension is a multiple of 16."""
    rows = carried_rows(a) or cast(Float8, quantize(a)[0])
    of_b = stack_by_rows(b) if transposed else stack_by_columns(b)
    scales = rows.scales, of_b.scales
    return rows_product(
        rows.values, of_b.values, order, transposed=True, gather=gather, bias=bias, scales=scales
    )


def check_float8(x: Tensor, gate_up: Any, down: Any, paths: Sequence[Any]) -> None:
    """Check what `moe_experts` can compute in float8.

    Raises:
        ValueError: a width that is not a multiple of 16, low-rank paths, or matrices in another form.
        TypeError: another dtype than bfloat16.
    """
    widths = {*gate_up.shape[1:], *down.shape[1:]}
    if paths or not isinstance(gate_up, Tensor) or any(width % ALIGNMENT for width in widths):
        raise ValueError(
            f"float8 was asked for {len(paths)} low-rank paths and matrices of {tuple(gate_up.shape)} and "
            f"{tuple(down.shape)}; expected no paths, and tensors whose widths are multiples of {ALIGNMENT}"
        )
    if x.dtype != torch.bfloat16:
        raise TypeError(f"float8 was asked for experts in {x.dtype}; expected bfloat16")


def float8_linear_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None = None
) -> Tensor:
    """Plain twin of both products of one expert: factors * (x @ weight^T + bias), in float8 forward and for
    x's gradient, which is computed before it is weighted.

    x [n, K], weight [N, K], factors [n, 1] or None.
    """
    return _Plain.apply(x, weight, bias, factors)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, factors)
        y = float8_product_plain(rows_plain(x.float()), rows_plain(weight.float()), torch.float32)
        y = (y if bias is None else y + bias.float()).to(x.dtype)
        return y if factors is None else y.float() * factors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, factors = ctx.saved_tensors
        dy = dy.to(x.dtype)
        dx = float8_product_plain(rows_plain(dy.float()), rows_plain(weight.T.float()), x.dtype)
        dfactors = None
        if factors is not None:
            dfactors = (dx.float() * x.float()).sum(1, keepdim=True)
            if bias is not None:
                dfactors += dy.float() @ bias.float()[:, None]
            dx = factors * dx.float()
            dy = factors * dy.float()
        dw = (dy.T.float() @ x.float()).to(weight.dtype)
        return dx.to(x.dtype), dw, None if bias is None else dy.float().sum(0).to(bias.dtype), dfactors


def stack_by_rows(stack: Tensor) -> Float8:
    """Quantise [E, N, K], contiguous, by rows: values [E, N, K], scales [E, N]."""
    rows = cast(Float8, quantize(stack.flatten(0, 1))[0])
    return Float8(rows.values.view(stack.shape), rows.scales.view(stack.shape[:2]))


def stack_by_columns(stack: Tensor) -> Float8:
    """Quantise [E, N, K], contiguous, by columns, transposed: values [E, K, N], scales [E, K]."""
    num_experts, height, width = stack.shape
    if not casts_to_float8(stack) or not stack.numel():
        rows = rows_plain(stack.transpose(1, 2).flatten(0, 1).float())
        return Float8(rows.values.view(num_experts, width, height), rows.scales.view(num_experts, width))
    values = stack.new_empty((num_experts, width, height), dtype=torch.float8_e4m3fn)
    scales = stack.new_empty((num_experts, width), dtype=torch.float32)
    with on_device_of(stack):
        _columns_kernel[(ceil_div(width, COLUMNS), num_experts)](
            stack, values, scales, height, width, LARGEST=448.0, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
        )
    return Float8(values, scales)


# Of a tile. A program reads its columns twice, the second time from the L2 cache.
ROWS, COLUMNS = 128, 64


@jit
def _columns_kernel(
    stack,
    values,
    scales,
    height,
    width,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stack += expert * height * width
    values += expert * height * width
    inside = column < width
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, height, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < height)[:, None] & inside[None, :]
        x = tl.load(stack + row.to(tl.int64)[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
    scale = scale_for(as_magnitude(tl.max(largest, 0)), LARGEST)
    tl.store(scales + expert * width + column, scale, inside)
    inverse = (1.0 / scale)[None, :]
    for first in range(0, height, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < height)[:, None] & inside[None, :]
        x = tl.load(stack + row.to(tl.int64)[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
        q = tl.trans((x * inverse).to(values.dtype.element_ty))
        target = values + column.to(tl.int64)[:, None] * height + row[None, :]
        tl.store(target, q, inside[:, None] & (row < height)[None, :])
