"""Kernels of the gated delta rule on chunks of 64 tokens; `_delta_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    columns_of,
    decay,
    inverse_lengths,
    log1p,
    numbers_of_chunk,
    rows_of,
    square_of,
    state_rows,
    store_numbers,
    store_numbers_of_chunk,
    store_strided_rows,
    unit_inverse,
)


@jit
def _decay_gate(a, A_log, dt_bias, token, head, live, a_stride, a_head):
    """exp(A_log), a + dt_bias and its softplus, for the tokens of a chunk."""
    speed = tl.exp(tl.load(A_log + head).to(tl.float32))
    shifted = tl.load(a + token * a_stride + head * a_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head).to(tl.float32)
    return speed, shifted, tl.maximum(shifted, 0.0) + log1p(tl.exp(-tl.abs(shifted)))


@jit
def prepare_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    transfer,
    scores,
    decays,
    betas,
    reads,
    writes,
    queries,
    q_lengths,
    k_lengths,
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
    square = chunk.to(tl.int64) * HEADS + head

    # All loads first: the rows, which take longest, and what would wait behind their sums.
    k_rows = rows_of(k, k_stride, start, count, key_head, key, DK)
    q_rows = rows_of(q, q_stride, start, count, key_head, key, DK)
    rate = tl.load(b + token * b_stride + head * b_head, live, 0.0).to(tl.float32)
    speed, _, softplus = _decay_gate(a, A_log, dt_bias, token, head, live, a_stride, a_head)
    k_length, q_length = inverse_lengths(k_rows, l2_eps), inverse_lengths(q_rows, l2_eps)
    if head % (HEADS // KEY_HEADS) == 0:
        store_numbers_of_chunk(k_lengths, k_length, chunk.to(tl.int64) * KEY_HEADS + key_head)
        store_numbers_of_chunk(q_lengths, q_length, chunk.to(tl.int64) * KEY_HEADS + key_head)
    step = tl.where(live, -speed * softplus, 0.0)
    g = tl.cumsum(step, 0)
    last = tl.sum(tl.where(tl.arange(0, 64) == 63, g, 0.0), 0)
    beta = tl.where(live, beta_scale * tl.sigmoid(rate), 0.0)
    store_numbers_of_chunk(decays, g, square)
    store_numbers_of_chunk(betas, beta, square)
    faded = tl.exp(g)
    store_numbers_of_chunk(reads, k_length * faded, square)
    store_numbers_of_chunk(writes, k_length * tl.exp(last - g), square)
    store_numbers_of_chunk(queries, scale * q_length * faded, square)

    place = square * 4096 + row * 64 + column
    remaining = decay(g[:, None], g[None, :], row >= column) * k_length[None, :]
    P = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
    P *= remaining * (scale * q_length)[:, None]
    tl.store(scores + place, P.to(scores.dtype.element_ty))
    A = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION) * remaining
    A = tl.where(row > column, A * (beta * k_length)[:, None], 0.0)
    solve = unit_inverse(A, SOLVE_PRECISION) * beta[None, :]
    tl.store(transfer + place, solve.to(transfer.dtype.element_ty))


@jit
def score_grads_kernel(
    k,
    do,
    scores,
    transfer,
    decays,
    betas,
    q_lengths,
    k_lengths,
    ranges,
    new_values,
    dvalues,
    ddecays,
    db,
    do_tiles,
    new_tiles,
    dvalue_tiles,
    k_stride,
    do_stride,
    chunks,
    beta_scale,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write db, the part of dG that comes from A and P, and over P and T the factors of pairs of rows in the
    gradients of q and k: dP with its decays over |q_i| |k_j|, and beta dA with its decays over |k_i| |k_j|
    dk^-1/2, plus its transpose.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key_head = head // (HEADS // KEY_HEADS)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = scores.dtype.element_ty
    square = chunk * HEADS + head
    place = square * 4096 + row * 64 + other
    dscores = tl.zeros([64, 64], tl.float32)
    dsolve = tl.zeros([64, 64], tl.float32)  # of -beta dA
    for begin in range(0, DV, BLOCK_V):
        do_rows = columns_of(do, do_tiles, do_stride, start, count, head, begin, BLOCK_V, DV)
        new = columns_of(new_values, new_tiles, HEADS * DV, start, count, head, begin, BLOCK_V, DV)
        dvalue = columns_of(dvalues, dvalue_tiles, HEADS * DV, start, count, head, begin, BLOCK_V, DV)
        dscores += tl.dot(do_rows, tl.trans(new), input_precision=PRECISION)
        dsolve += tl.dot(dvalue, tl.trans(new), input_precision=PRECISION)
    # beta_i dbeta_i = dR_i . N_i, and dR_i = dV_i / beta_i.
    beta = numbers_of_chunk(betas, square)
    dbeta = tl.sum(tl.where(row == other, dsolve, 0.0), 1)
    slope = (1.0 - beta / beta_scale) / tl.where(beta > 0.0, beta, 1.0)
    store_numbers(db, tl.where(beta > 0.0, dbeta * slope, 0.0), start, count, head, HEADS)

    g = numbers_of_chunk(decays, square)
    q_length = numbers_of_chunk(q_lengths, chunk * KEY_HEADS + key_head)
    k_length = numbers_of_chunk(k_lengths, chunk * KEY_HEADS + key_head)
    seen = (row >= other) & (row < count)
    earlier = seen & (row > other)
    remaining = decay(g[:, None], g[None, :], seen) * k_length[None, :]
    # A token's own score does not decay: omitting it avoids a cancellation.
    product = tl.where(earlier, dscores * tl.load(scores + place).to(tl.float32), 0.0)
    dscores = tl.where(seen, dscores * remaining * q_length[:, None], 0.0)
    tl.store(scores + place, dscores.to(dtype))
    dsolve = tl.where(earlier, dsolve * remaining * (-k_length / scale)[:, None], 0.0)
    # Symmetric: a pair of rows acts on the gradients of both.
    tl.store(transfer + place, (dsolve + tl.trans(dsolve)).to(dtype))
    k_rows = rows_of(k, k_stride, start, count, key_head, tl.arange(0, BLOCK_K), DK)
    product += dsolve * scale * tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
    store_numbers_of_chunk(ddecays, tl.sum(product, 1) - tl.sum(product, 0), square)


@jit
def operand_grads_kernel(
    q,
    k,
    do,
    dscores,
    dsolve,
    decays,
    read_factors,
    write_factors,
    query_factors,
    q_lengths,
    k_lengths,
    ranges,
    states,
    written,
    carried,
    dvalues,
    ddecays,
    dq,
    dk,
    q_tiles,
    k_tiles,
    do_tiles,
    dvalue_tiles,
    score_tiles,
    solve_tiles,
    state_tiles,
    q_stride,
    k_stride,
    do_stride,
    dq_stride,
    dq_head,
    written_stride,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write dq and dk, with equal strides, and dG in two parts. dq comes first and dk after it, so that two
    programs fit on a multiprocessor.
    """
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key, token = tl.arange(0, BLOCK_K), tl.arange(0, 64)
    # Summed over value heads; of the normalised rows times their inverse lengths, divided by dk^-1/2.
    dqueries = tl.zeros([64, BLOCK_K], tl.float32)
    for nth in tl.range(0, HEADS // KEY_HEADS, disable_licm=True):
        head = key_head * (HEADS // KEY_HEADS) + nth
        square = chunk * HEADS + head
        asked = tl.zeros([64, BLOCK_K], tl.float32)  # through what the queries read
        for begin in range(0, DV, BLOCK_V):
            do_rows = columns_of(do, do_tiles, do_stride, start, count, head, begin, BLOCK_V, DV)
            state = state_rows(states, state_tiles, square, key, begin, BLOCK_V, DK, DV)
            asked += tl.dot(do_rows, state, input_precision=PRECISION)
        asked *= (numbers_of_chunk(query_factors, square) / scale)[:, None]
        q_rows = columns_of(q, q_tiles, q_stride, start, count, key_head, 0, BLOCK_K, DK)
        through_queries = scale * tl.sum(q_rows.to(tl.float32) * asked, 1)
        store_numbers_of_chunk(ddecays + chunks * HEADS * 64, through_queries, square)
        dqueries += asked
        k_rows = columns_of(k, k_tiles, k_stride, start, count, key_head, 0, BLOCK_K, DK)
        by_scores = square_of(dscores, score_tiles, square)
        dqueries += tl.dot(by_scores, k_rows, input_precision=PRECISION)
    # Through the normalisation: the part along the vector itself has no effect.
    q_rows = columns_of(q, q_tiles, q_stride, start, count, key_head, 0, BLOCK_K, DK)
    q_length = numbers_of_chunk(q_lengths, chunk * KEY_HEADS + key_head)
    unit = q_rows.to(tl.float32) * q_length[:, None]
    dqueries -= unit * tl.sum(dqueries * unit, 1)[:, None]
    part = dq + key_head * (dq_head - DK)
    store_strided_rows(part, dqueries * scale, dq_stride, start, count, key_head, key, DK)

    last_row = tl.minimum(count, 64) - 1
    dkeys = tl.zeros([64, BLOCK_K], tl.float32)
    for nth in tl.range(0, HEADS // KEY_HEADS, disable_licm=True):
        head = key_head * (HEADS // KEY_HEADS) + nth
        square = chunk * HEADS + head
        k_rows = columns_of(k, k_tiles, k_stride, start, count, key_head, 0, BLOCK_K, DK)
        share = tl.zeros([64], tl.float32)
        part = written
        for _ in tl.static_range(BLOCKS):
            # through the next state
            wrote = rows_of(part, HEADS * DK, start, count, head, key, DK).to(tl.float32)
            share += tl.sum(k_rows.to(tl.float32) * wrote, 1)
            dkeys += wrote / scale
            part += written_stride
        read = tl.zeros([64, BLOCK_K], tl.float32)  # through what the keys read, V - exp(G) K S
        for begin in range(0, DV, BLOCK_V):
            dvalue = columns_of(dvalues, dvalue_tiles, HEADS * DV, start, count, head, begin, BLOCK_V, DV)
            state = state_rows(states, state_tiles, square, key, begin, BLOCK_V, DK, DV)
            read += tl.dot(dvalue, state, input_precision=PRECISION)
        read *= (numbers_of_chunk(read_factors, square) / scale)[:, None]
        k_rows = columns_of(k, k_tiles, k_stride, start, count, key_head, 0, BLOCK_K, DK)
        through_keys = tl.sum(k_rows.to(tl.float32) * read, 1)
        dkeys -= read
        # The last token's write into the next state does not decay.
        share = tl.where(token < last_row, share, 0.0)
        value = tl.arange(0, BLOCK_VALUES)
        into_next = tl.sum(tl.load(carried + square * DV + value, value < DV, 0.0), 0)
        dlast = tl.sum(share, 0) + tl.exp(tl.load(decays + square * 64 + 63)) * into_next
        dcumulative = numbers_of_chunk(ddecays, square) - share - scale * through_keys
        dcumulative += tl.where(token == last_row, dlast, 0.0)
        store_numbers_of_chunk(ddecays, dcumulative, square)
        q_rows = columns_of(q, q_tiles, q_stride, start, count, key_head, 0, BLOCK_K, DK)
        by_scores, by_solve = square_of(dscores, score_tiles, square), square_of(dsolve, solve_tiles, square)
        dkeys += tl.dot(tl.trans(by_scores), q_rows, input_precision=PRECISION)
        dkeys += tl.dot(by_solve, k_rows, input_precision=PRECISION)
    k_rows = columns_of(k, k_tiles, k_stride, start, count, key_head, 0, BLOCK_K, DK)
    k_length = numbers_of_chunk(k_lengths, chunk * KEY_HEADS + key_head)
    unit = k_rows.to(tl.float32) * k_length[:, None]
    dkeys -= unit * tl.sum(dkeys * unit, 1)[:, None]
    part = dk + key_head * (dq_head - DK)
    store_strided_rows(part, dkeys * scale, dq_stride, start, count, key_head, key, DK)


@jit
def gate_grads_kernel(
    a,
    A_log,
    dt_bias,
    ddecays,
    da,
    gate_sums,
    ranges,
    a_stride,
    a_head,
    chunks,
    HEADS: tl.constexpr,
):
    """Write da, and the sums over the chunk that give the gradients of A_log and dt_bias."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    square = chunk * HEADS + head
    token = tl.arange(0, 64)
    # A token's g is part of G of all later tokens of the chunk.
    dcumulative = numbers_of_chunk(ddecays, square) + numbers_of_chunk(ddecays + chunks * HEADS * 64, square)
    dg = tl.cumsum(tl.where(token < count, dcumulative, 0.0), 0, reverse=True)
    speed, shifted, softplus = _decay_gate(
        a, A_log, dt_bias, start.to(tl.int64) + token, head, token < count, a_stride, a_head
    )
    decay_grad = -dg * speed * tl.sigmoid(shifted)
    store_numbers(da, decay_grad, start, count, head, HEADS)
    tl.store(gate_sums + square, -tl.sum(dg * speed * softplus, 0))
    tl.store(gate_sums + chunks * HEADS + square, tl.sum(decay_grad, 0))
