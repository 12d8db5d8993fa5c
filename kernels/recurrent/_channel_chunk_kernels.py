"""Kernels of the delta rule with a decay for each channel; `_channel_chunks.py` has the formulas.

Products of rows i > j with the decay exp(G_i - G_j) of each channel split it into two factors, by row:

    within blocks   exp(G_i - G_m) exp(G_m - G_j), with the middle row m of a block that holds i and j. Blocks
                    have 64 or 16 rows, the largest for which no |G - G_m| exceeds SPAN, or else one row.
    between blocks  by levels. Level h holds the pairs whose row numbers first differ in bit h: i is in the
                    upper half and j in the lower half of 2^(h+1) rows. With G_r of the upper half's first
                    row, exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j), both at most one: each row takes one
                    factor, E = exp(-|G - G_r|), and a level is one product of 64 x 64.

Blocks of one row leave all pairs to six levels, for any gates; blocks of 64 rows leave none. A program looks
only at its own chunk, so that the choice does not depend on other documents.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    inverse_lengths,
    log1p,
    rows_of,
    state_columns,
    store_rows,
    unit_inverse,
)


@jit
def _running_decays(cumulative, start, count, head, row, key, HEADS: tl.constexpr, DK: tl.constexpr):
    """G of the given rows, [rows, BLOCK_K]; rows past the end repeat the last token's."""
    token = start.to(tl.int64) + tl.minimum(row, tl.minimum(count, 64) - 1)
    place = (token[:, None] * HEADS + head) * DK + key[None, :]
    return tl.load(cumulative + place, (key < DK)[None, :], 0.0)


@jit
def _level_factor(cumulative, g, start, count, head, level, key, HEADS: tl.constexpr, DK: tl.constexpr):
    """E of a level: [C, BLOCK_K]."""
    row = tl.arange(0, 64)
    half = row >> level
    first_of_upper = (half | 1) << level
    return tl.exp(
        -tl.abs(g - _running_decays(cumulative, start, count, head, first_of_upper, key, HEADS, DK))
    )


@jit
def _within_blocks(
    cumulative, g, start, count, head, key, SPAN: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr
):
    """The first level between blocks, 6, 4 or 0, and G - G_m: [C, BLOCK_K]."""
    row = tl.arange(0, 64)
    from_32 = g - _running_decays(cumulative, start, count, head, row * 0 + 32, key, HEADS, DK)
    middle = (row // 16) * 16 + 8
    from_8 = g - _running_decays(cumulative, start, count, head, middle, key, HEADS, DK)
    of_64 = tl.max(tl.max(tl.abs(from_32), 1), 0) <= SPAN
    of_16 = tl.max(tl.max(tl.abs(from_8), 1), 0) <= SPAN
    first_level = tl.where(of_64, 6, tl.where(of_16, 4, 0))
    return first_level, tl.where(of_64, from_32, tl.where(of_16, from_8, 0.0))


@jit
def _log_decay(raw, rate, lower_bound, BOUNDED: tl.constexpr):
    """The log decay g from raw + dt_bias, with rate = exp(A_log)."""
    if BOUNDED:
        g = lower_bound * tl.sigmoid(rate * raw)
    else:
        g = -rate * (tl.maximum(raw, 0.0) + log1p(tl.exp(-tl.abs(raw))))
    return g


@jit
def gates_kernel(
    f,
    A_log,
    dt_bias,
    cumulative,
    ranges,
    f_stride,
    f_head,
    chunks,
    lower_bound,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Write G [T, HEADS, DK]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row = tl.arange(0, 64)
    live = (row < count)[:, None] & (key < DK)[None, :]
    place = start.to(tl.int64) * f_stride + head * f_head + row[:, None] * f_stride + key[None, :]
    raw = tl.load(f + place, live, 0.0).to(tl.float32)
    raw += tl.load(dt_bias + head * DK + key, key < DK, 0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    g = tl.where(live, _log_decay(raw, rate, lower_bound, BOUNDED), 0.0)
    store_rows(cumulative, tl.cumsum(g, 0), start, count, head, key, HEADS, DK)


@jit
def prepare_kernel(
    q,
    k,
    v,
    b,
    cumulative,
    writes,
    reads,
    values,
    queries,
    scores,
    totals,
    transfer,
    ranges,
    q_stride,
    k_stride,
    v_stride,
    b_stride,
    b_head,
    chunks,
    beta_scale,
    l2_eps,
    scale,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    SPAN: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """The channels are processed in parts, to fit the registers."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    whole = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, 64)
    row, other = rows[:, None], rows[None, :]
    dtype = q.dtype.element_ty
    token = start.to(tl.int64) + rows
    last_token = (start + tl.minimum(count, 64) - 1).to(tl.int64)
    q_length = scale * inverse_lengths(rows_of(q, q_stride, start, count, head, whole, DK), l2_eps)
    k_length = inverse_lengths(rows_of(k, k_stride, start, count, head, whole, DK), l2_eps)

    A = tl.zeros([64, 64], tl.float32)
    P = tl.zeros([64, 64], tl.float32)
    for begin in range(0, DK, BLOCK_PART):
        key = begin + tl.arange(0, BLOCK_PART)
        q_rows = rows_of(q, q_stride, start, count, head, key, DK).to(tl.float32) * q_length[:, None]
        k_rows = rows_of(k, k_stride, start, count, head, key, DK).to(tl.float32) * k_length[:, None]
        g = _running_decays(cumulative, start, count, head, rows, key, HEADS, DK)
        last = tl.load(cumulative + (last_token * HEADS + head) * DK + key, key < DK, 0.0)
        store_rows(queries, q_rows * tl.exp(g), start, count, head, key, HEADS, DK)
        store_rows(writes, k_rows * tl.exp(last[None, :] - g), start, count, head, key, HEADS, DK)
        tl.store(totals + (chunk.to(tl.int64) * HEADS + head) * DK + key, tl.exp(last), key < DK)
        P += tl.where(row == other, tl.sum(q_rows * k_rows, 1)[:, None], 0.0)
        first_level, away = _within_blocks(cumulative, g, start, count, head, key, SPAN, HEADS, DK)
        for level in range(first_level, 6):
            factor = _level_factor(cumulative, g, start, count, head, level, key, HEADS, DK)
            upper = ((rows >> level) & 1) == 1
            keys = (k_rows * factor).to(dtype)
            mixed = (tl.where(upper[:, None], q_rows, k_rows) * factor).to(dtype)
            pairs = (((row ^ other) >> level) == 1) & (row > other)
            A += tl.where(pairs, tl.dot(keys, tl.trans(keys), input_precision=PRECISION), 0.0)
            P += tl.where(pairs, tl.dot(mixed, tl.trans(mixed), input_precision=PRECISION), 0.0)
        # After the levels: a product whose result enters a loop with products is not divided among all warps.
        within = ((row ^ other) >> first_level == 0) & (row > other)
        late, early = tl.exp(away), tl.trans((k_rows * tl.exp(-away)).to(dtype))
        by_keys = tl.dot((k_rows * late).to(dtype), early, input_precision=PRECISION)
        A += tl.where(within, by_keys, 0.0)  # above the diagonal, products may overflow
        P += tl.where(within, tl.dot((q_rows * late).to(dtype), early, input_precision=PRECISION), 0.0)
    square = (chunk.to(tl.int64) * HEADS + head) * 4096 + row * 64 + other
    tl.store(scores + square, P.to(dtype))
    rate = tl.load(b + token * b_stride + head * b_head, rows < count, 0.0).to(tl.float32)
    beta = tl.where(rows < count, beta_scale * tl.sigmoid(rate), 0.0)
    solve = unit_inverse(A * beta[:, None], SOLVE_PRECISION)
    if transfer is not None:
        tl.store(transfer + square, solve.to(dtype))
    solve = (solve * beta[None, :]).to(dtype)
    for begin in range(0, DK, BLOCK_PART):
        key = begin + tl.arange(0, BLOCK_PART)
        k_rows = rows_of(k, k_stride, start, count, head, key, DK).to(tl.float32) * k_length[:, None]
        g = _running_decays(cumulative, start, count, head, rows, key, HEADS, DK)
        read = tl.dot(solve, (k_rows * tl.exp(g)).to(dtype), input_precision=PRECISION)
        store_rows(reads, read, start, count, head, key, HEADS, DK)
    for begin in range(0, DV, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        v_rows = rows_of(v, v_stride, start, count, head, column, DV)
        value = tl.dot(solve, v_rows, input_precision=PRECISION)
        store_rows(values, value, start, count, head, column, HEADS, DV)


@jit
def channel_grads_kernel(
    q,
    k,
    f,
    A_log,
    dt_bias,
    do,
    cumulative,
    dscores,
    dsolve,
    states,
    dstates,
    new_values,
    dvalues,
    dqueries,
    dkeys,
    df,
    dA_log,
    ddt_bias,
    ranges,
    q_stride,
    k_stride,
    f_stride,
    f_head,
    do_stride,
    chunks,
    first_head,
    lower_bound,
    l2_eps,
    scale,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    SPAN: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """For a part of the channels of HELD heads from `first_head` on, write the gradients of the normalised q
    and k in float32, [T, HELD, DK], that of f, and each chunk's part of those of A_log and dt_bias.
    """
    chunk, local, nth = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    head = first_head + local
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    rows = tl.arange(0, 64)
    row, other = rows[:, None], rows[None, :]
    dtype = q.dtype.element_ty
    whole = tl.arange(0, BLOCK_K)
    key = nth * BLOCK_PART + tl.arange(0, BLOCK_PART)
    q_length = scale * inverse_lengths(rows_of(q, q_stride, start, count, head, whole, DK), l2_eps)
    k_length = inverse_lengths(rows_of(k, k_stride, start, count, head, whole, DK), l2_eps)
    dq_rows = tl.zeros([64, BLOCK_PART], tl.float32)
    by_reads = tl.zeros([64, BLOCK_PART], tl.float32)
    by_writes = tl.zeros([64, BLOCK_PART], tl.float32)
    carried = tl.zeros([BLOCK_PART], tl.float32)
    offset = (chunk * HEADS + head) * DK * DV
    for begin in range(0, DV, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        state = state_columns(states, offset, key, column, DK, DV)
        dstate = state_columns(dstates, offset, key, column, DK, DV)
        do_rows = rows_of(do, do_stride, start, count, head, column, DV)
        dq_rows += tl.dot(do_rows, state, input_precision=PRECISION)
        dvalue = rows_of(dvalues, HEADS * DV, start, count, head, column, DV)
        by_reads -= tl.dot(dvalue, state, input_precision=PRECISION)
        new = rows_of(new_values, HEADS * DV, start, count, head, column, DV)
        by_writes += tl.dot(new, dstate, input_precision=PRECISION)
        carried += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)

    q_rows = rows_of(q, q_stride, start, count, head, key, DK).to(tl.float32) * q_length[:, None]
    k_rows = rows_of(k, k_stride, start, count, head, key, DK).to(tl.float32) * k_length[:, None]
    g = _running_decays(cumulative, start, count, head, rows, key, HEADS, DK)
    last_token = (start + tl.minimum(count, 64) - 1).to(tl.int64)
    last = tl.load(cumulative + (last_token * HEADS + head) * DK + key, key < DK, 0.0)
    last_row = (rows == tl.minimum(count, 64) - 1)[:, None]
    faded = tl.exp(g)
    dq_rows *= faded
    by_reads *= faded
    by_writes *= tl.exp(last[None, :] - g)
    dk_rows = by_reads + by_writes
    # The last token's write and a token's own score do not decay: omitting them avoids a cancellation.
    share = tl.where(last_row, 0.0, k_rows * by_writes)
    dg = q_rows * dq_rows + k_rows * by_reads - share
    dg += tl.where(last_row, (tl.sum(share, 0) + tl.exp(last) * carried)[None, :], 0.0)
    # Symmetric: a pair of rows acts on the gradients of both.
    square = (chunk * HEADS + head) * 4096
    by_scores = tl.load(dscores + square + row * 64 + other).to(tl.float32)
    by_scores += tl.where(row < other, tl.load(dscores + square + other * 64 + row).to(tl.float32), 0.0)
    by_solve = tl.load(dsolve + square + row * 64 + other).to(tl.float32)
    by_solve += tl.load(dsolve + square + other * 64 + row).to(tl.float32)
    own = tl.sum(tl.where(row == other, by_scores, 0.0), 1)[:, None]
    dq_rows += own * k_rows
    dk_rows += own * q_rows
    by_scores, by_solve = by_scores.to(dtype), by_solve.to(dtype)
    first_level, away = _within_blocks(cumulative, g, start, count, head, key, SPAN, HEADS, DK)
    for level in range(first_level, 6):
        factor = _level_factor(cumulative, g, start, count, head, level, key, HEADS, DK)
        upper = (((rows >> level) & 1) == 1)[:, None]
        pairs = ((row ^ other) >> level) == 1
        keys = (k_rows * factor).to(dtype)
        mixed = (tl.where(upper, q_rows, k_rows) * factor).to(dtype)
        through_keys = tl.dot(tl.where(pairs, by_solve, 0.0).to(dtype), keys, input_precision=PRECISION)
        through = tl.dot(tl.where(pairs, by_scores, 0.0).to(dtype), mixed, input_precision=PRECISION)
        # With the rounded factors, a pair adds at one end exactly what it subtracts at the other.
        share = keys.to(tl.float32) * through_keys + mixed.to(tl.float32) * through
        dg += tl.where(upper, share, -share)
        through *= factor
        dq_rows += tl.where(upper, through, 0.0)
        dk_rows += through_keys * factor + tl.where(upper, 0.0, through)

    # After the levels: a product whose result enters a loop with products is not divided among all warps.
    within = (row ^ other) >> first_level == 0
    late, early = tl.exp(away), tl.exp(-away)
    late_keys, early_keys = (k_rows * late).to(dtype), (k_rows * early).to(dtype)
    late_queries = (q_rows * late).to(dtype)
    pairs = tl.where(within & (row > other), by_solve, 0.0).to(dtype)
    through = tl.dot(pairs, early_keys, input_precision=PRECISION)
    dg += late_keys.to(tl.float32) * through
    dk_rows += late * through
    pairs = tl.where(within & (row > other), by_scores, 0.0).to(dtype)
    through = tl.dot(pairs, early_keys, input_precision=PRECISION)
    dg += late_queries.to(tl.float32) * through
    dq_rows += late * through
    pairs = tl.where(within & (row < other), by_solve, 0.0).to(dtype)
    through = tl.dot(pairs, late_keys, input_precision=PRECISION)
    dg -= early_keys.to(tl.float32) * through
    dk_rows += early * through
    pairs = tl.where(within & (row < other), by_scores, 0.0).to(dtype)
    through = tl.dot(pairs, late_queries, input_precision=PRECISION)
    dg -= early_keys.to(tl.float32) * through
    dk_rows += early * through

    # A token's g is part of G of all later tokens of the chunk.
    dg = tl.cumsum(dg, 0, reverse=True)
    live = (rows < count)[:, None] & (key < DK)[None, :]
    place = start.to(tl.int64) * f_stride + head * f_head + row * f_stride + key[None, :]
    raw = tl.load(f + place, live, 0.0).to(tl.float32)
    raw += tl.load(dt_bias + head * DK + key, key < DK, 0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    if BOUNDED:
        sigmoid = tl.sigmoid(rate * raw)
        draw = dg * (lower_bound * rate) * sigmoid * (1.0 - sigmoid)
        dlog_rate = draw * raw
    else:
        draw = -dg * rate * tl.sigmoid(raw)
        dlog_rate = dg * _log_decay(raw, rate, lower_bound, BOUNDED)
    draw = tl.where(live, draw, 0.0)
    store_rows(df, draw, start, count, head, key, HEADS, DK)
    tl.store(ddt_bias + (chunk * HEADS + head) * DK + key, tl.sum(draw, 0), key < DK)
    place = (nth * tl.num_programs(0) + chunk) * HEADS + head
    tl.store(dA_log + place, tl.sum(tl.sum(tl.where(live, dlog_rate, 0.0), 1), 0))
    store_rows(dqueries, dq_rows, start, count, local, key, HELD, DK)
    store_rows(dkeys, dk_rows, start, count, local, key, HELD, DK)


@jit
def norm_grads_kernel(
    q,
    k,
    dqueries,
    dkeys,
    dq,
    dk,
    ranges,
    q_stride,
    k_stride,
    chunks,
    first_head,
    l2_eps,
    scale,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write dq and dk from the gradients of the normalised ones."""
    chunk, local = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = first_head + local
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    # Through the normalisation: the part along the vector itself has no effect.
    rows = rows_of(q, q_stride, start, count, head, key, DK).to(tl.float32)
    length = inverse_lengths(rows, l2_eps)
    grads = rows_of(dqueries, HELD * DK, start, count, local, key, DK)
    rows *= length[:, None]
    grads = (grads - rows * tl.sum(grads * rows, 1)[:, None]) * (scale * length)[:, None]
    store_rows(dq, grads, start, count, head, key, HEADS, DK)
    rows = rows_of(k, k_stride, start, count, head, key, DK).to(tl.float32)
    length = inverse_lengths(rows, l2_eps)
    grads = rows_of(dkeys, HELD * DK, start, count, local, key, DK)
    rows *= length[:, None]
    grads = (grads - rows * tl.sum(grads * rows, 1)[:, None]) * length[:, None]
    store_rows(dk, grads, start, count, head, key, HEADS, DK)
