"""Kernels of RMSNorm with a gate; `gated_rms_norm.py` has the formulas."""

# mypy: ignore-errors
# mypy cannot type tuples of Triton values that grow in unrolled loops.

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels._fast_math import sigmoid
from liger_models.kernels.norms._norm_sums import rstd_of


@jit
def _weight_rows(weight, own, mask, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """The weight in every row of a tile, loaded in the tile's layout: if it had one of its own, Triton would
    move all tiles into that.
    """
    places = tl.broadcast_to(weight + own, (BLOCK_ROWS, BLOCK_WIDTH))
    return tl.load(places, tl.broadcast_to(mask, (BLOCK_ROWS, BLOCK_WIDTH)), 0.0)


@jit
def _add_pairs(first, second, more_first, more_second):
    return first + more_first, second + more_second


@jit
def _activation(gate, SILU: tl.constexpr):
    """act(gate) and its derivative."""
    slope = sigmoid(gate)
    derivative = slope * (1 - slope)
    if SILU:
        return gate * slope, slope + gate * derivative
    return slope, derivative


@jit
def forward_kernel(
    x,
    gate,
    weight,
    y,
    x_stride,
    gate_stride,
    rows,
    width,
    eps,
    FOLDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    # 64 bits only if there are so many rows: their division takes longer than all else.
    row = (tl.program_id(0) + 0 * rows) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    token, group = (row // FOLDED).to(tl.int64), row % FOLDED + tl.program_id(1)
    mask = (row < rows) & (column < width)
    within = group * width + column
    own = tl.program_id(1) * width + column
    value = tl.load(x + token * x_stride + within, mask, 0.0)
    dtype = value.dtype
    value = value.to(tl.float32)
    activated, _ = _activation(tl.load(gate + token * gate_stride + within, mask, 0.0).to(tl.float32), SILU)
    if GATE_FIRST:
        value *= activated
    normed = value * rstd_of(tl.sum(value * value, 1, keep_dims=True), width, eps)
    scale = _weight_rows(weight, own, column < width, BLOCK_ROWS, BLOCK_WIDTH)
    if ROUND_FIRST:
        promoted = (scale * normed.to(dtype)).dtype
        result = (scale.to(tl.float32) * normed.to(dtype).to(tl.float32)).to(promoted).to(tl.float32)
    else:
        result = scale.to(tl.float32) * normed
    if not GATE_FIRST:
        result *= activated
    channels = width * FOLDED * tl.num_programs(1)
    tl.store(y + token * channels + within, result.to(y.dtype.element_ty), mask)


@jit
def _tile_values(x, gate, dy, mask, GATE_FIRST: tl.constexpr, SILU: tl.constexpr):
    """x, act(gate) and its derivative, h, dy, and the gradient of n * weight, of a tile."""
    value = tl.load(x, mask, 0.0).to(tl.float32)
    raw_gate = tl.load(gate, mask, 0.0).to(tl.float32)
    gradient = tl.load(dy, mask, 0.0).to(tl.float32)
    activated, slope = _activation(raw_gate, SILU)
    hidden = value * activated if GATE_FIRST else value
    upstream = gradient if GATE_FIRST else gradient * activated
    return value, activated, slope, hidden, gradient, upstream


@jit
def _tile_grads(
    values, scale, rstd, mean, dtype: tl.constexpr, GATE_FIRST: tl.constexpr, ROUND_FIRST: tl.constexpr
):
    """The terms of dweight, dx and dgate of a tile; `mean` of dn * n over the group."""
    value, activated, slope, hidden, gradient, upstream = values
    normed = hidden * rstd
    seen = normed.to(dtype).to(tl.float32) if ROUND_FIRST else normed  # the factor of the weight
    dhidden = (upstream * scale - normed * mean) * rstd
    if GATE_FIRST:
        dvalue, dgate = dhidden * activated, dhidden * value * slope
    else:
        dvalue, dgate = dhidden, gradient * seen * scale * slope
    return upstream * seen, dvalue, dgate


@jit
def backward_kernel(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    sums,
    dy_stride,
    x_stride,
    gate_stride,
    dgate_stride,
    rows,
    width,
    eps,
    FOLDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    own = tl.program_id(1) * width + column
    channels = width * FOLDED * tl.num_programs(1)
    scale = _weight_rows(weight, own, column < width, BLOCK_ROWS, BLOCK_WIDTH).to(tl.float32)
    accumulated = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    one_over_width = 1.0 / width
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        token, group = (row // FOLDED).to(tl.int64), row % FOLDED + tl.program_id(1)
        mask = (row < rows) & (column < width)
        within = group * width + column
        values = _tile_values(
            x + token * x_stride + within,
            gate + token * gate_stride + within,
            dy + token * dy_stride + within,
            mask,
            GATE_FIRST,
            SILU,
        )
        hidden, upstream = values[3], values[5]
        # One reduction for both sums: threads wait for each other once.
        squares, products = tl.reduce(
            (hidden * hidden, upstream * scale * hidden), 1, _add_pairs, keep_dims=True
        )
        rstd = rstd_of(squares, width, eps)
        mean = products * rstd * one_over_width
        terms, dvalue, draw = _tile_grads(
            values, scale, rstd, mean, x.dtype.element_ty, GATE_FIRST, ROUND_FIRST
        )
        accumulated += terms
        tl.store(dx + token * channels + within, dvalue.to(dx.dtype.element_ty), mask)
        tl.store(dgate + token * dgate_stride + within, draw.to(dgate.dtype.element_ty), mask)
    total = tl.sum(accumulated, 0, keep_dims=True)
    weights = width * tl.num_programs(1)
    tl.store(sums + tl.program_id(0) * weights + own, total, column < width)


@jit
def wide_backward_kernel(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    sums,
    dy_stride,
    x_stride,
    gate_stride,
    dgate_stride,
    rows,
    width,
    eps,
    FOLDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """As `backward_kernel`, for groups too wide to keep in registers: a row is read in parts, first for its
    sums, then once more, from the cache, for its gradients.
    """
    channels = width * FOLDED * tl.num_programs(1)
    one_over_width = 1.0 / width
    weight += tl.program_id(1) * width
    accumulated = ()
    for _ in tl.static_range(PARTS):
        accumulated += (tl.zeros([BLOCK_WIDTH], tl.float32),)
    for nth in range(0, tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + nth * tl.num_programs(0)
        token, group = (row // FOLDED).to(tl.int64), row % FOLDED + tl.program_id(1)
        x_row = x + token * x_stride + group * width
        gate_row = gate + token * gate_stride + group * width
        dy_row = dy + token * dy_stride + group * width
        squares = tl.zeros([BLOCK_WIDTH], tl.float32)
        products = tl.zeros([BLOCK_WIDTH], tl.float32)
        for part in tl.static_range(PARTS):
            column = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            mask = column < width
            values = _tile_values(x_row + column, gate_row + column, dy_row + column, mask, GATE_FIRST, SILU)
            scale = tl.load(weight + column, mask, 0.0).to(tl.float32)
            squares += values[3] * values[3]
            products += values[5] * scale * values[3]
        square, product = tl.reduce((squares, products), 0, _add_pairs)
        rstd = rstd_of(square, width, eps)
        mean = product * rstd * one_over_width
        dx_row = dx + token * channels + group * width
        dgate_row = dgate + token * dgate_stride + group * width
        more = ()
        for part in tl.static_range(PARTS):
            column = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
            mask = column < width
            values = _tile_values(x_row + column, gate_row + column, dy_row + column, mask, GATE_FIRST, SILU)
            scale = tl.load(weight + column, mask, 0.0).to(tl.float32)
            terms, dvalue, draw = _tile_grads(
                values, scale, rstd, mean, x.dtype.element_ty, GATE_FIRST, ROUND_FIRST
            )
            more += (accumulated[part] + terms,)
            # Streamed, so that they do not take the place of rows in the cache.
            tl.store(dx_row + column, dvalue.to(dx.dtype.element_ty), mask, cache_modifier=".cs")
            tl.store(dgate_row + column, draw.to(dgate.dtype.element_ty), mask, cache_modifier=".cs")
        accumulated = more
    weights = width * tl.num_programs(1)
    sums += tl.program_id(0) * weights + tl.program_id(1) * width
    for part in tl.static_range(PARTS):
        column = part * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        tl.store(sums + column, accumulated[part], column < width)
