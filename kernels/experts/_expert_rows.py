"""Row operations between the experts' matrix products: each kernel makes one pass over memory.

    spread_rows:     rows[r] = x[token of r]                                 T H + R H elements moved
    sum_slots:       y[t] = sum over slots j of weights[t, j] * rows[row of (t, j)]      R H + T H
    weighted_activation:  a = act(gate) * up, [gate | up] = weights[r] * h[r]                  3 R I
    activation_backward:  gradients of it, or of weights * a with [gate | up] = h                6 R I
    weigh_rows:      weights[r] * rows[r]                                            2 R n
    sum_by_expert:   sums[e] = sum over the rows r of e of weights[r] * rows[r]                  R H

Experts without gates have a = max(h, 0)^2, h [R, I], instead: 2 R I and 4 R I.

Sums are in float32 and in a fixed order, without atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import as_rows, ceil_div, jit, next_power_of_2, on_device_of, tl
from liger_models.kernels.activations.gated import (
    Activation,
    CappedSwiGLU,
    ClampedSwiGLU,
    activation_constants,
    capped_swiglu,
    clamped_swiglu,
    gated_factors,
    geglu,
    has_gate,
    relu2,
    swiglu,
)
from liger_models.kernels.experts._expert_order import ExpertOrder
from liger_models.kernels.float8.copies import carry_rows
from liger_models.kernels.float8.quantize import as_magnitude, casts_to_float8, empty_rows, scale_for


def spread_rows(
    x: Tensor,
    order: ExpertOrder,
    tokens: slice = slice(None),
    out: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """x [T, H] -> [R, H], each row a copy of its token, multiplied by `scale` if given. Reads each row of x
    once. Of some tokens only, if given, into `out`. Of a window, its rows only.
    """
    x = as_rows(x)[tokens]
    width = x.shape[1]
    rows = x.new_empty(order.num_rows, width) if out is None else out
    if rows.numel() and len(x):
        block = min(1024, next_power_of_2(width))
        each = _tokens_each(order)
        with on_device_of(x):
            _spread_rows_kernel[(ceil_div(len(x), each), ceil_div(width, block))](
                x,
                order.position.view(-1, order.top_k)[tokens],
                rows,
                scale,
                x.stride(0),
                len(x),
                width,
                order.first,
                order.num_rows,
                TOP_K=order.top_k,
                TOKENS=each,
                SLOTS=next_power_of_2(each * order.top_k),
                BLOCK=block,
            )
    return rows


def sum_slots(
    rows: Tensor,
    weights: Tensor | None,
    order: ExpertOrder,
    tokens: slice = slice(None),
    out: Tensor | None = None,
    parts: Tensor | None = None,
) -> Tensor:
    """rows [R, H], weights [T, k] or None for ones -> y [T, H], summed in the order of slots. Of some tokens
    only, if given, into their rows of `out`; `parts` [n, t, H], contiguous, are then other terms of these
    t sums, and added last.

    Of windows, the last one comes first: each adds its rows to those of later ones, which `out` has. A later
    window leaves other tokens as they are. `out` may be columns of a wider result.
    """
    width, position = rows.shape[1], order.position.view(-1, order.top_k)
    y = rows.new_empty(len(position), width) if out is None else out
    if (of_tokens := y[tokens]).numel():
        block = min(1024, next_power_of_2(width))
        weights = None if weights is None else weights.contiguous()[tokens]
        each = _tokens_each(order)
        with on_device_of(y):
            _sum_slots_kernel[(ceil_div(len(of_tokens), each), ceil_div(width, block))](
                rows,
                weights,
                position[tokens],
                of_tokens,
                parts if parts is not None and len(parts) else None,
                of_tokens.stride(0),
                len(of_tokens),
                width,
                order.first,
                order.num_rows,
                PARTS=0 if parts is None else len(parts),
                TOP_K=order.top_k,
                TOKENS=each,
                SLOTS=next_power_of_2(each * order.top_k),
                BLOCK=block,
            )
    return y


def _tokens_each(order: ExpertOrder) -> int:
    """Tokens of a program: many in a later window, which usually has rows of none."""
    return 1 if order.first == 0 else max(1, 256 // order.top_k)


def weighted_activation(h: Tensor, weights: Tensor, order: ExpertOrder, activation: Activation) -> Tensor:
    """Return a [R, I] of weights * h, from h [R, 2 I], or [R, I] without gates, and weights [T, k]."""
    _, _, a = activation_backward(
        None, h, weights, order, activation, False, False, want_product=True, inputs=True
    )
    assert a is not None
    return a


def activated(h: Tensor, activation: Activation, order: ExpertOrder | None = None) -> Tensor:
    """Return a [R, I] of h [R, 2 I], or [R, I] without gates; with `order`, only of the rows that it has."""
    if order is not None and not order.full:
        a = activation_backward(None, h, None, order, activation, False, False, want_product=True)[2]
        assert a is not None
        return a
    if isinstance(activation, ClampedSwiGLU):
        return clamped_swiglu(h, None, activation.alpha, activation.limit, plus_one=activation.plus_one)
    if isinstance(activation, CappedSwiGLU):
        return capped_swiglu(h, None, activation.limit)
    if activation == "relu2":
        return relu2(h)
    if activation == "silu":
        return swiglu(h)
    return geglu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def weigh_rows(rows: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
    """rows [R, n], contiguous, weights [T, k] -> weights[r] * rows[r]."""
    num_rows, width = rows.shape
    weighted = torch.empty_like(rows)
    if rows.numel():
        block = min(1024, next_power_of_2(width))
        block_rows = 1024 // block
        with on_device_of(rows):
            _weigh_rows_kernel[(ceil_div(num_rows, block_rows), ceil_div(width, block))](
                rows,
                weights.contiguous(),
                order.order,
                order.offsets,
                weighted,
                order.offsets.numel() - 1,
                width,
                BLOCK_ROWS=block_rows,
                BLOCK=block,
            )
    return weighted


def activation_backward(
    dproduct: Tensor | None,
    h: Tensor,
    weights: Tensor | None,
    order: ExpertOrder,
    activation: Activation,
    want_h: bool,
    want_weights: bool,
    want_product: bool,
    inputs: bool = False,
    of_bias: Tensor | None = None,
    experts: Tensor | None = None,
    float8: bool = False,
    dweights: Tensor | None = None,
    overwrite: bool = False,
    product_scale: float | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the requested ones of dh, dweights [T, k] and weights * a [R, I], multiplied by `product_scale`
    if given. The last takes dproduct's memory, and dh that of h with `overwrite`.

    h and dh are [R, 2 I], or [R, I] without gates, and dproduct [R, I] the gradient of a before weighting;
    only the last result can be computed without it. dweights includes the gradient through the last
    product's bias, of_bias [T, E] float32 at experts [T, k], if given.

    With `inputs` the weights multiply h instead of a, and the last result is a. With `float8` dh carries its
    copy in e4m3 by rows (kernels/float8/copies.py). `dweights` is that of another window, and written to.
    """
    gated = has_gate(activation)
    num_rows, width = h.shape[0], h.shape[1] // (2 if gated else 1)
    weights = None if weights is None else weights.contiguous()
    dh = None
    if want_h:
        dh = h if overwrite else torch.empty_like(h)
    # Empty slots have no row that writes their gradient.
    memory = torch.empty_like if order.full else torch.zeros_like
    if dweights is None and want_weights and weights is not None:
        dweights = memory(weights)
    product = None
    if want_product:
        product = h.new_empty(num_rows, width) if dproduct is None else dproduct
    rows = empty_rows(dh) if float8 and dh is not None and casts_to_float8(dh) else None
    if num_rows:
        block = min(256, next_power_of_2(max(width, 1)))
        # Few programs of a later window, which usually has no rows: 28,672 empty ones took 18 us on an H200.
        block_rows, num_warps = (1024 // block, 4) if order.first == 0 else (4096 // block, 8)
        with on_device_of(h):
            _activation_backward_kernel[(ceil_div(num_rows, block_rows),)](
                dproduct,
                h,
                weights,
                order.order,
                order.offsets,
                of_bias,
                experts,
                dh,
                *(rows or (None, None)),
                dweights,
                product,
                product_scale,
                width,
                order.offsets.numel() - 1,
                **activation_constants(activation),
                GATED=gated,
                INPUTS=inputs,
                TOP_K=order.top_k,
                BLOCK_ROWS=block_rows,
                BLOCK=block,
                num_warps=num_warps,
            )
    if dh is not None and rows is not None:
        carry_rows(dh, rows)
    return dh, dweights, product


def sum_by_expert(rows: Tensor, weights: Tensor | None, order: ExpertOrder) -> Tensor:
    """rows [R, H], weights [T, k] or None for ones -> [E, H], zero for an expert without rows."""
    num_experts, width = order.offsets.numel() - 1, rows.shape[1]
    sums = rows.new_empty(num_experts, width)
    if sums.numel():
        weights = None if weights is None else weights.contiguous()
        block = min(64, next_power_of_2(width))
        with on_device_of(rows):
            _sum_by_expert_kernel[(ceil_div(width, block), num_experts)](
                rows, weights, order.order, order.offsets, sums, width, BLOCK_ROWS=64, BLOCK=block
            )
    return sums


@jit
def _spread_rows_kernel(
    x,
    position,
    rows,
    scale,
    x_stride,
    tokens,
    width,
    first_row,
    num_rows,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0) * TOKENS
    turns = 1
    if TOKENS > 1:
        turns = _tokens_if_any(position, start, tokens, first_row, num_rows, TOP_K, TOKENS, SLOTS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    for i in range(0, turns):
        token = (start + i).to(tl.int64)
        value = tl.load(x + token * x_stride + column, mask)
        if scale is not None:
            value = (value * scale).to(rows.dtype.element_ty)
        for slot in tl.static_range(TOP_K):
            row = tl.load(position + token * TOP_K + slot).to(tl.int64) - first_row
            # Like mask & (0 <= row), a block mask and a scalar, which Triton 3.9's interpreter rejects.
            inside = tl.where((row >= 0) & (row < num_rows), width, 0)
            tl.store(rows + row * width + column, value, column < inside)


@jit
def _sum_slots_kernel(
    rows,
    weights,
    position,
    y,
    parts,
    y_stride,
    tokens,
    width,
    first_row,
    num_rows,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0) * TOKENS
    turns = 1
    if TOKENS > 1:
        turns = _tokens_if_any(position, start, tokens, first_row, num_rows, TOP_K, TOKENS, SLOTS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in range(0, turns):
        token = (start + i).to(tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        own, later = 0, 0
        for slot in tl.static_range(TOP_K):
            row = tl.load(position + token * TOP_K + slot).to(tl.int64) - first_row
            inside = (row >= 0) & (row < num_rows)
            own += inside.to(tl.int32)
            later += (row >= num_rows).to(tl.int32)
            row_mask = column < tl.where(inside, width, 0)
            value = tl.load(rows + row * width + column, row_mask, 0.0).to(tl.float32)
            if weights is not None:
                value *= tl.load(weights + token * TOP_K + slot, inside, 0.0).to(tl.float32)
            total += value
        at = y + token * y_stride + column
        total += tl.load(at, column < tl.where(later > 0, width, 0), 0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            row = part * tokens.to(tl.int64) + token
            total += tl.load(parts + row * width + column, column < width, 0.0).to(tl.float32)
        stored = width
        if TOKENS > 1:
            stored = tl.where(own > 0, width, 0)
        tl.store(at, total.to(y.dtype.element_ty), column < stored)


@jit
def _tokens_if_any(
    position,
    start,
    tokens,
    first_row,
    num_rows,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The number of a program's tokens, or 0 if none has a row in the window."""
    found = tl.minimum(TOKENS, tokens - start)
    slot = tl.arange(0, SLOTS)
    row = tl.load(position + start.to(tl.int64) * TOP_K + slot, slot < found * TOP_K, -1) - first_row
    return tl.where(tl.max(((row >= 0) & (row < num_rows)).to(tl.int32), 0) > 0, found, 0)


@jit
def _weigh_rows_kernel(
    rows,
    weights,
    order,
    offsets,
    weighted,
    num_experts,
    width,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_mask = row < tl.load(offsets + num_experts)
    weight = tl.load(weights + tl.load(order + row, row_mask, 0), row_mask, 0.0).to(tl.float32)
    mask = row_mask[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(rows + at, mask, 0.0).to(tl.float32) * weight[:, None]
    tl.store(weighted + at, value.to(weighted.dtype.element_ty), mask)


@jit
def _activation_backward_kernel(
    dproduct,
    h,
    weights,
    order,
    offsets,
    of_bias,
    experts,
    dh,
    values,
    scales,
    dweights,
    product,
    product_scale,
    width,
    num_experts,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    count = tl.load(offsets + num_experts)
    if tl.program_id(0) * BLOCK_ROWS >= count:  # as in a later window, which is usually empty
        return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < count
    assignment = tl.load(order + row, row_mask, 0)
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + assignment, row_mask, 0.0).to(tl.float32)[:, None]
    dweight = tl.zeros((BLOCK_ROWS,), tl.float32)
    largest = tl.zeros((BLOCK_ROWS, BLOCK), tl.int32)
    start = row.to(tl.int64)[:, None] * width
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = row_mask[:, None] & (column < width)
        # Without gates, `gate` is h, and up and its gradient do not exist.
        gate_at = 2 * start + column if GATED else start + column
        up_at = gate_at + width
        gate = tl.load(h + gate_at, mask, 0.0).to(tl.float32)
        up = tl.load(h + up_at, mask, 0.0).to(tl.float32) if GATED else 1.0
        g, u, product_weight = gate, up, weight
        if INPUTS:
            g, product_weight = weight * gate, 1.0
            u = weight * up if GATED else up
        activated, derivative, factor, factor_derivative = gated_factors(g, u, ACTIVATION, ALPHA, LIMIT)
        gradient = 0.0
        if dproduct is not None:  # read first: the product may have the same memory, and dh that of h
            gradient = tl.load(dproduct + start + column, mask, 0.0).to(tl.float32)
        if product is not None:
            value = product_weight * activated * factor
            if product_scale is not None:
                value *= product_scale
            tl.store(product + start + column, value.to(product.dtype.element_ty), mask)
        if dproduct is not None:
            dgate = gradient * factor * derivative
            dup = gradient * activated * factor_derivative
            if INPUTS:
                dweight += tl.sum(dgate * gate + dup * up if GATED else dgate * gate, 1)
            else:
                dweight += tl.sum(gradient * activated * factor, 1)
            if dh is not None:
                dgate = (dgate * weight).to(dh.dtype.element_ty)
                tl.store(dh + gate_at, dgate, mask)
                if values is not None:
                    largest = tl.maximum(largest, _bits(dgate, mask))
                if GATED:
                    dup = (dup * weight).to(dh.dtype.element_ty)
                    tl.store(dh + up_at, dup, mask)
                    if values is not None:
                        largest = tl.maximum(largest, _bits(dup, mask))
    if dweights is not None:
        if of_bias is not None:
            expert = tl.load(experts + assignment, row_mask, 0).to(tl.int64)
            token = (assignment // TOP_K).to(tl.int64)
            dweight += tl.load(of_bias + token * num_experts + expert, row_mask, 0.0)
        tl.store(dweights + assignment, dweight.to(dweights.dtype.element_ty), row_mask)
    if values is not None:
        tl.debug_barrier()  # this thread reads values that other threads wrote
        scale = scale_for(as_magnitude(tl.max(largest, 1)), 448.0)
        tl.store(scales + row, scale, row_mask)
        whole = 2 * width if GATED else width
        start = row.to(tl.int64)[:, None] * whole
        for first in range(0, whole, BLOCK):
            column = first + tl.arange(0, BLOCK)[None, :]
            mask = row_mask[:, None] & (column < whole)
            value = tl.load(dh + start + column, mask, 0.0).to(tl.float32) * (1.0 / scale)[:, None]
            tl.store(values + start + column, value.to(values.dtype.element_ty), mask)


@jit
def _bits(x, mask):
    """The bits of magnitudes in float32, which are ordered as these are."""
    return tl.where(mask, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True), 0)


@jit
def _sum_by_expert_kernel(
    rows, weights, order, offsets, sums, width, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(1)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for first in range(start, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        value = tl.load(rows + row.to(tl.int64)[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
        if weights is not None:
            assignment = tl.load(order + row, row < end, 0)
            value *= tl.load(weights + assignment, row < end, 0.0).to(tl.float32)[:, None]
        total += value
    at = sums + expert.to(tl.int64) * width + column
    tl.store(at, tl.sum(total, 0).to(sums.dtype.element_ty), column < width)
