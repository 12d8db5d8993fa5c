"""Kernels of the gated delta rule on chunks of 64 tokens; `_delta_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    columns_of,
    decay,
    inverse_lengths,
    log1p,
    numbers_of,
    rows_of,
    running_decay,
    state_columns,
    store_numbers,
    store_rows,
    turned_state,
    unit_inverse,
)


@jit
def prepare_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    transfer,
    cumulative,
    betas,
    q_scales,
    k_scales,
    ranges,
    q_stride,
    k_stride,
    a_stride,
    a_head,
    b_stride,
    b_head,
    chunks,
    beta_scale,
    l2_eps,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key_head = head // (HEADS // KEY_HEADS)
    key = tl.arange(0, BLOCK_K)
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    token = start.to(tl.int64) + tl.arange(0, 64)
    live = tl.arange(0, 64) < count

    shifted = tl.load(a + token * a_stride + head * a_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.maximum(shifted, 0.0) + log1p(tl.exp(-tl.abs(shifted)))
    g = tl.cumsum(tl.where(live, -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus, 0.0), 0)
    rate = tl.load(b + token * b_stride + head * b_head, live, 0.0).to(tl.float32)
    beta = tl.where(live, beta_scale * tl.sigmoid(rate), 0.0)
    tl.store(cumulative + token * HEADS + head, g, live)
    tl.store(betas + token * HEADS + head, beta, live)

    k_rows = rows_of(k, k_stride, start, count, key_head, key, DK)
    k_scale = inverse_lengths(k_rows, l2_eps)
    if head % (HEADS // KEY_HEADS) == 0:
        tl.store(k_scales + token * KEY_HEADS + key_head, k_scale, live)
        q_rows = rows_of(q, q_stride, start, count, key_head, key, DK)
        q_scale = scale * inverse_lengths(q_rows, l2_eps)
        tl.store(q_scales + token * KEY_HEADS + key_head, q_scale, live)

    A = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
    A *= (beta * k_scale)[:, None] * k_scale[None, :] * decay(g[:, None], g[None, :], row > column)
    inverse = unit_inverse(A, SOLVE_PRECISION)
    place = transfer + (chunk.to(tl.int64) * HEADS + head) * 4096 + row * 64 + column
    tl.store(place, inverse.to(transfer.dtype.element_ty))


@jit
def query_grads_kernel(
    q,
    k,
    do,
    cumulative,
    q_scales,
    k_scales,
    ranges,
    states,
    new_values,
    dq,
    dcumulatives,
    do_tiles,
    new_tiles,
    state_tiles,
    q_stride,
    k_stride,
    do_stride,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    q_rows = rows_of(q, q_stride, start, count, key_head, key, DK)
    k_rows = rows_of(k, k_stride, start, count, key_head, key, DK)
    q_scale = numbers_of(q_scales, start, count, key_head, KEY_HEADS)
    k_scale = numbers_of(k_scales, start, count, key_head, KEY_HEADS)
    dq_rows = tl.zeros([64, BLOCK_K], tl.float32)  # of the scaled queries, summed over value heads
    for nth in range(0, HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + nth
        square = chunk * HEADS + head
        g, _ = running_decay(cumulative, start, count, head, HEADS)
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        for begin in range(0, DV, BLOCK_V):
            do_rows = columns_of(do, do_tiles, do_stride, start, count, head, begin, BLOCK_V, DV)
            new = columns_of(new_values, new_tiles, HEADS * DV, start, count, head, begin, BLOCK_V, DV)
            state = turned_state(states, state_tiles, square, key, begin, BLOCK_V, DK, DV)
            by_state += tl.dot(do_rows, state, input_precision=PRECISION)
            dscores += tl.dot(do_rows, tl.trans(new), input_precision=PRECISION)
        by_state *= tl.exp(g)[:, None]
        dq_rows += by_state
        dcumulative = q_scale * tl.sum(q_rows.to(tl.float32) * by_state, 1)
        seen = (row >= other) & (row < count)
        dscores = tl.where(seen, dscores * decay(g[:, None], g[None, :], seen), 0.0)
        scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        # A token's own score does not decay: omitting it avoids a cancellation.
        product = tl.where(row > other, dscores * scores * q_scale[:, None] * k_scale[None, :], 0.0)
        dcumulative += tl.sum(product, 1) - tl.sum(product, 0)
        dq_rows += tl.dot((dscores * k_scale[None, :]).to(dtype), k_rows, input_precision=PRECISION)
        store_numbers(dcumulatives, dcumulative, start, count, head, HEADS)
    # Through the normalisation: the part along the vector itself has no effect.
    unit = q_rows.to(tl.float32) * (q_scale / scale)[:, None]
    along = tl.sum(dq_rows * unit, 1)[:, None]
    store_rows(dq, (dq_rows - unit * along) * q_scale[:, None], start, count, key_head, key, KEY_HEADS, DK)


@jit
def key_grads_kernel(
    q,
    k,
    v,
    do,
    cumulative,
    betas,
    q_scales,
    k_scales,
    ranges,
    states,
    dstates,
    new_values,
    dresiduals,
    dk,
    dv,
    dg,
    dbeta,
    q_stride,
    k_stride,
    v_stride,
    do_stride,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write dk, dv, dg and dbeta; `dv` may be `dresiduals`."""
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    k_rows = rows_of(k, k_stride, start, count, key_head, key, DK)
    k_scale = numbers_of(k_scales, start, count, key_head, KEY_HEADS)
    last_row = tl.arange(0, 64) == tl.minimum(count, 64) - 1
    dk_rows = tl.zeros([64, BLOCK_K], tl.float32)  # of the normalised keys, summed over value heads
    for nth in range(0, HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + nth
        offset = (chunk * HEADS + head) * DK * DV
        g, last = running_decay(cumulative, start, count, head, HEADS)
        beta = numbers_of(betas, start, count, head, HEADS)

        # Through the next state and the scores P.
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        carried = 0.0
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            do_rows = rows_of(do, do_stride, start, count, head, column, DV)
            new = rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = state_columns(states, offset, key, column, DK, DV)
            dstate = state_columns(dstates, offset, key, column, DK, DV)
            by_state += tl.dot(new, dstate, input_precision=PRECISION)
            dscores += tl.dot(new, tl.trans(do_rows), input_precision=PRECISION)
            carried += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        by_state *= tl.exp(last - g)[:, None]
        dk_rows += by_state
        # The last token's write into the next state does not decay either.
        share = tl.where(last_row, 0.0, k_scale * tl.sum(k_rows.to(tl.float32) * by_state, 1))
        dcumulative = numbers_of(dg, start, count, head, HEADS) - share
        dlast = tl.sum(share, 0) + tl.exp(last) * carried
        q_scale = numbers_of(q_scales, start, count, key_head, KEY_HEADS)
        q_rows = rows_of(q, q_stride, start, count, key_head, key, DK)
        dscores *= q_scale[None, :] * decay(g[None, :], g[:, None], other >= row)
        dk_rows += tl.dot(dscores.to(dtype), q_rows, input_precision=PRECISION)

        # Through what the keys read, V - exp(G) K S, and through A.
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dsolve = tl.zeros([64, 64], tl.float32)
        drate = tl.zeros([64], tl.float32)
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            dresidual = rows_of(dresiduals, HEADS * DV, start, count, head, column, DV)
            new = rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = state_columns(states, offset, key, column, DK, DV)
            v_rows = rows_of(v, v_stride, start, count, head, column, DV)
            by_state += tl.dot(dresidual, state, input_precision=PRECISION)
            dsolve -= tl.dot(dresidual, tl.trans(new), input_precision=PRECISION)
            drate += tl.sum(dresidual.to(tl.float32) * v_rows.to(tl.float32), 1)
            dvalues = dresidual.to(tl.float32) * beta[:, None]
            store_rows(dv, dvalues, start, count, head, column, HEADS, DV)
        by_state *= tl.exp(g)[:, None]
        dk_rows -= by_state * beta[:, None]
        share = k_scale * tl.sum(k_rows.to(tl.float32) * by_state, 1)
        drate -= share
        dcumulative -= beta * share
        dsolve *= decay(g[:, None], g[None, :], row > other)
        gram = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
        product = dsolve * gram * k_scale[:, None] * k_scale[None, :]
        drate += tl.sum(product, 1)
        product *= beta[:, None]
        dcumulative += tl.sum(product, 1) - tl.sum(product, 0)
        dsolve *= beta[:, None]
        both = ((dsolve + tl.trans(dsolve)) * k_scale[None, :]).to(dtype)
        dk_rows += tl.dot(both, k_rows, input_precision=PRECISION)

        dcumulative += tl.where(last_row, dlast, 0.0)
        # A token's g is part of G of all later tokens of the chunk.
        store_numbers(dg, tl.cumsum(dcumulative, 0, reverse=True), start, count, head, HEADS)
        store_numbers(dbeta, drate, start, count, head, HEADS)
    unit = k_rows.to(tl.float32) * k_scale[:, None]
    along = tl.sum(dk_rows * unit, 1)[:, None]
    store_rows(dk, (dk_rows - unit * along) * k_scale[:, None], start, count, key_head, key, KEY_HEADS, DK)
