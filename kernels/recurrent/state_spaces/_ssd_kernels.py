"""Kernels of the scan of Mamba 2 on chunks of 64 tokens; `_ssd_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    numbers_of,
    rows_of,
    running_decay,
    segment_of,
    softplus,
    store_numbers,
    store_strided_rows,
)


@jit
def _decay(g_row, g_column):
    """exp(G_row - G_column), and 1 where the row comes first: mask those. G falls, so nothing overflows."""
    return tl.exp(tl.minimum(g_row - g_column, 0.0))


@jit
def prepare_kernel(
    dt,
    A_log,
    dt_bias,
    steps,
    cumulative,
    ranges,
    dt_stride,
    dt_head,
    tokens,
    chunks,
    heads,
    lowest,
    highest,
    BLOCK_HEADS: tl.constexpr,
):
    """Write d and G of a chunk: [heads, tokens] each."""
    chunk = tl.program_id(0)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    token = start.to(tl.int64) + tl.arange(0, 64)
    live = (tl.arange(0, 64) < count)[:, None] & (head < heads)[None, :]
    shifted = tl.load(dt + token[:, None] * dt_stride + head[None, :] * dt_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head, head < heads, 0.0).to(tl.float32)[None, :]
    step = tl.minimum(tl.maximum(softplus(shifted), lowest), highest)
    rate = -tl.exp(tl.load(A_log + head, head < heads, 0.0).to(tl.float32))
    total = tl.cumsum(tl.where(live, rate[None, :] * step, 0.0), 0)
    place = head[None, :].to(tl.int64) * tokens + token[:, None]
    tl.store(steps + place, step, live)
    tl.store(cumulative + place, total, live)


@jit
def states_kernel(
    x,
    B,
    C,
    D,
    steps,
    cumulative,
    cu_seqlens,
    segments,
    initial,
    boundaries,
    y,
    final,
    x_stride,
    b_stride,
    c_stride,
    state_stride,
    tokens,
    heads,
    segment_count,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass a head's state over the chunks of a segment, from the true state before it, and write the output
    and the final state.
    """
    document, first, end, _, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if document < 0:
        return
    head = tl.program_id(1)
    group = head // PER_GROUP
    column = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, BLOCK_N)
    inside = (column < P)[:, None] & (channel < N)[None, :]
    place = column[:, None] * N + channel[None, :]
    of_document = document.to(tl.int64) * state_stride + head * P * N
    steps += head.to(tl.int64) * tokens
    cumulative += head.to(tl.int64) * tokens
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = x.dtype.element_ty
    skip = tl.load(D + head).to(tl.float32)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside & (first == opening), 0.0)
    if boundaries is not None:
        before = ((boundary - 1) * heads + head) * P * N
        state += tl.load(boundaries + before + place, inside & (first > opening), 0.0)
    for nth in range(0, tl.cdiv(end - first, 64)):
        start = first + nth * 64
        count = end - start
        x_rows = rows_of(x, x_stride, start, count, head, column, P)
        b_rows = rows_of(B, b_stride, start, count, group, channel, N)
        c_rows = rows_of(C, c_stride, start, count, group, channel, N)
        g, last = running_decay(cumulative, start, count, 0, 1)
        step = numbers_of(steps, start, count, 0, 1)
        scores = tl.dot(c_rows, tl.trans(b_rows), input_precision=PRECISION)
        scores = tl.where(row >= other, scores * step[None, :] * _decay(g[:, None], g[None, :]), 0.0)
        out = tl.dot(c_rows, tl.trans(state.to(dtype)), input_precision=PRECISION) * tl.exp(g)[:, None]
        out += tl.dot(scores.to(dtype), x_rows, input_precision=PRECISION)
        store_strided_rows(y, out + x_rows.to(tl.float32) * skip, heads * P, start, count, head, column, P)
        written = (x_rows.to(tl.float32) * (step * tl.exp(last - g))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(written), b_rows, input_precision=PRECISION)
    tl.store(final + of_document + place, state, inside & (end == ending))


@jit
def pass_kernel(
    x,
    B,
    C,
    dy,
    steps,
    cumulative,
    cu_seqlens,
    segments,
    initial,
    dfinal,
    boundaries,
    transfers,
    states,
    dinitial,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    state_stride,
    tokens,
    heads,
    chunks,
    boundary_count,
    segment_count,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Pass a block of a head's state over the chunks of a segment, or the state's gradient back.

    The former writes S of every chunk to the first of `states` [2, chunks, ...], the latter dS' to the
    second. With LOCAL they start from zero (at a document's ends, from what is given there) and write what
    leaves the segment to `boundaries` [2, boundaries, ...], and the segment's decay to `transfers`. Without,
    they start from `boundaries`, the true states and gradients.
    """
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    blocks = tl.cdiv(P, BLOCK_P) * tl.cdiv(N, BLOCK_N)
    back = tl.program_id(0) >= blocks
    block = tl.where(back, tl.program_id(0) - blocks, tl.program_id(0))
    leaves = tl.where(back, first > opening, end < ending)  # for another segment of the document
    if (document < 0) | (LOCAL & (leaves == 0)):
        return
    head = tl.program_id(1)
    group = head // PER_GROUP
    column = block % tl.cdiv(P, BLOCK_P) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = block // tl.cdiv(P, BLOCK_P) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (column < P)[:, None] & (channel < N)[None, :]
    place = column[:, None] * N + channel[None, :]
    of_document = document.to(tl.int64) * state_stride + head * P * N
    steps += head.to(tl.int64) * tokens
    cumulative += head.to(tl.int64) * tokens
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    total = 0.0
    if back:
        chunk += tl.cdiv(end - first, 64) - 1
        if dfinal is not None:
            state += tl.load(dfinal + of_document + place, inside & (end == ending), 0.0)
        if not LOCAL and boundaries is not None:
            after = boundaries + ((boundary_count + boundary) * heads + head) * P * N
            state += tl.load(after + place, inside & (end < ending), 0.0)
        for nth in range(0, tl.cdiv(end - first, 64)):
            start = first + (tl.cdiv(end - first, 64) - 1 - nth) * 64
            count = end - start
            dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
            c_rows = rows_of(C, c_stride, start, count, group, channel, N)
            g, last = running_decay(cumulative, start, count, 0, 1)
            if not LOCAL:
                here = states + ((chunks + chunk) * heads + head) * P * N
                tl.store(here + place, state.to(states.dtype.element_ty), inside)
            asked = (dy_rows.to(tl.float32) * tl.exp(g)[:, None]).to(dy.dtype.element_ty)
            state = state * tl.exp(last) + tl.dot(tl.trans(asked), c_rows, input_precision=PRECISION)
            chunk -= 1
        if LOCAL:
            before = boundaries + ((boundary_count + boundary - 1) * heads + head) * P * N
            tl.store(before + place, state, inside)
        elif dinitial is not None:
            tl.store(dinitial + of_document + place, state, inside & (first == opening))
    else:
        if initial is not None:
            state += tl.load(initial + of_document + place, inside & (first == opening), 0.0)
        if not LOCAL and boundaries is not None:
            before = boundaries + ((boundary - 1) * heads + head) * P * N
            state += tl.load(before + place, inside & (first > opening), 0.0)
        for nth in range(0, tl.cdiv(end - first, 64)):
            start = first + nth * 64
            count = end - start
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            b_rows = rows_of(B, b_stride, start, count, group, channel, N)
            g, last = running_decay(cumulative, start, count, 0, 1)
            step = numbers_of(steps, start, count, 0, 1)
            if not LOCAL:
                here = states + (chunk * heads + head) * P * N
                tl.store(here + place, state.to(states.dtype.element_ty), inside)
            written = (x_rows.to(tl.float32) * (step * tl.exp(last - g))[:, None]).to(x.dtype.element_ty)
            state = state * tl.exp(last) + tl.dot(tl.trans(written), b_rows, input_precision=PRECISION)
            total += last
            chunk += 1
        if LOCAL:
            tl.store(boundaries + (boundary * heads + head) * P * N + place, state, inside)
            tl.store(transfers + boundary * heads + head, tl.exp(total), block == 0)


@jit
def query_grads_kernel(
    x,
    B,
    C,
    dy,
    steps,
    cumulative,
    ranges,
    states,
    dC,
    pairs,
    dcumulative,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    dc_stride,
    tokens,
    heads,
    chunks,
    PER_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dC, R and its and the queries' share of dG, over a part of a group's heads."""
    chunk, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    channel = tl.arange(0, BLOCK_N)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = x.dtype.element_ty
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    # A token's own score does not decay: without it there is no cancellation in the sums for dG.
    others = tl.where(row > other, tl.dot(c_rows, tl.trans(b_rows), input_precision=PRECISION), 0.0)
    dc_rows = tl.zeros([64, BLOCK_N], tl.float32)
    summed = tl.zeros([64, 64], tl.float32)
    for nth in range(0, PER_GROUP // PARTS):
        head = group * PER_GROUP + part * (PER_GROUP // PARTS) + nth
        numbers = head.to(tl.int64) * tokens
        g, _ = running_decay(cumulative + numbers, start, count, 0, 1)
        step = numbers_of(steps + numbers, start, count, 0, 1)
        dtotal = tl.zeros([64], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        for begin in tl.static_range(0, P, BLOCK_P):
            column = begin + tl.arange(0, BLOCK_P)
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
            inside = (column < P)[:, None] & (channel < N)[None, :]
            place = (chunk * heads + head) * P * N + column[:, None] * N + channel[None, :]
            state = tl.load(states + place, inside, 0.0)
            dscores += tl.dot(dy_rows, tl.trans(x_rows), input_precision=PRECISION)
            read = tl.dot(c_rows, tl.trans(state), input_precision=PRECISION)
            dtotal += tl.sum(read * dy_rows.to(tl.float32), 1)
            asked = (dy_rows.to(tl.float32) * tl.exp(g)[:, None]).to(dtype)
            dc_rows += tl.dot(asked, state, input_precision=PRECISION)
        dscores *= step[None, :] * _decay(g[:, None], g[None, :])
        summed += dscores
        product = dscores * others
        dtotal = dtotal * tl.exp(g) + tl.sum(product, 1) - tl.sum(product, 0)
        store_numbers(dcumulative + numbers, dtotal, start, count, 0, 1)
    rounded = tl.where(row >= other, summed, 0.0).to(dtype)
    square = (chunk * tl.num_programs(1) + tl.program_id(1)) * 4096
    tl.store(pairs + square + row * 64 + other, rounded)
    dc_rows += tl.dot(rounded, b_rows, input_precision=PRECISION)
    dC += part.to(tl.int64) * tokens * dc_stride
    if ADD:
        dc_rows += rows_of(dC, dc_stride, start, count, group, channel, N)
    store_strided_rows(dC, dc_rows, dc_stride, start, count, group, channel, N)


@jit
def key_grads_kernel(
    x,
    B,
    C,
    D,
    dy,
    steps,
    cumulative,
    ranges,
    states,
    pairs,
    shares,
    dsteps,
    dskips,
    carried,
    dx,
    dB,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    dx_stride,
    db_stride,
    tokens,
    heads,
    chunks,
    PER_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dX, dB and, for the gates' gradients, each token's share through the next state, dd and dD, and
    <S, dS'> by row of the state, over a part of a group's heads.
    """
    chunk, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    channel = tl.arange(0, BLOCK_N)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = x.dtype.element_ty
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    scores = tl.dot(b_rows, tl.trans(c_rows), input_precision=PRECISION)  # transposed: rows are keys
    scores = tl.where(other >= row, scores, 0.0)
    square = (chunk * tl.num_programs(1) + tl.program_id(1)) * 4096
    dscores = tl.load(pairs + square + other * 64 + row)  # transposed
    db_rows = tl.dot(dscores, c_rows, input_precision=PRECISION)
    for nth in range(0, PER_GROUP // PARTS):
        head = group * PER_GROUP + part * (PER_GROUP // PARTS) + nth
        numbers = head.to(tl.int64) * tokens
        g, last = running_decay(cumulative + numbers, start, count, 0, 1)
        step = numbers_of(steps + numbers, start, count, 0, 1)
        left = tl.exp(last - g)
        weights = (scores * _decay(g[None, :], g[:, None])).to(dtype)
        skip = tl.load(D + head).to(tl.float32)
        share = tl.zeros([64], tl.float32)
        dstep = tl.zeros([64], tl.float32)
        dskip = tl.zeros([64], tl.float32)
        for begin in tl.static_range(0, P, BLOCK_P):
            column = begin + tl.arange(0, BLOCK_P)
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
            inside = (column < P)[:, None] & (channel < N)[None, :]
            place = (chunk * heads + head) * P * N + column[:, None] * N + channel[None, :]
            state = tl.load(states + place, inside, 0.0)
            after = ((chunks + chunk) * heads + head) * P * N + column[:, None] * N + channel[None, :]
            dstate = tl.load(states + after, inside, 0.0)
            by_row = tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
            tl.store(carried + (chunk * heads + head) * P + column, by_row, column < P)
            by_state = tl.dot(b_rows, tl.trans(dstate), input_precision=PRECISION) * left[:, None]
            dwritten = by_state + tl.dot(weights, dy_rows, input_precision=PRECISION)
            wide, dwide = x_rows.to(tl.float32), dy_rows.to(tl.float32)
            share += tl.sum(wide * by_state, 1)
            dstep += tl.sum(wide * dwritten, 1)
            dskip += tl.sum(wide * dwide, 1)
            dx_rows = dwritten * step[:, None] + dwide * skip
            store_strided_rows(dx, dx_rows, dx_stride, start, count, head, column, P)
            written = (wide * (step * left)[:, None]).to(dtype)
            db_rows += tl.dot(written, dstate, input_precision=PRECISION)
        store_numbers(shares + numbers, share * step, start, count, 0, 1)
        store_numbers(dsteps + numbers, dstep, start, count, 0, 1)
        store_numbers(dskips + numbers, dskip, start, count, 0, 1)
    dB += part.to(tl.int64) * tokens * db_stride
    if ADD:
        db_rows += rows_of(dB, db_stride, start, count, group, channel, N)
    store_strided_rows(dB, db_rows, db_stride, start, count, group, channel, N)


@jit
def gate_grads_kernel(
    dt,
    A_log,
    dt_bias,
    steps,
    cumulative,
    dcumulative,
    shares,
    dsteps,
    dskips,
    carried,
    ranges,
    ddt,
    sums,
    dt_stride,
    dt_head,
    ddt_stride,
    sums_stride,
    tokens,
    chunks,
    heads,
    lowest,
    highest,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Write ddt and the chunk's sums for dA_log, ddt_bias and dD."""
    chunk = tl.program_id(0)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    token = start.to(tl.int64) + tl.arange(0, 64)
    live = (tl.arange(0, 64) < count)[:, None] & (head < heads)[None, :]
    place = head[None, :].to(tl.int64) * tokens + token[:, None]
    column = tl.arange(0, BLOCK_P)
    rows = (chunk.to(tl.int64) * heads + head[:, None]) * P + column[None, :]
    through = tl.sum(tl.load(carried + rows, (head < heads)[:, None] & (column < P)[None, :], 0.0), 1)
    final = (start + tl.minimum(count, 64) - 1).to(tl.int64)
    last = tl.load(cumulative + head.to(tl.int64) * tokens + final, head < heads, 0.0)
    last_row = (tl.arange(0, 64) == tl.minimum(count, 64) - 1)[:, None]
    # The last token's write into the next state does not decay either.
    share = tl.where(last_row, 0.0, tl.load(shares + place, live, 0.0))
    dlast = tl.sum(share, 0) + tl.exp(last) * through
    dtotal = tl.load(dcumulative + place, live, 0.0) - share + tl.where(last_row, dlast[None, :], 0.0)
    # A token's g is part of G of all later tokens of the chunk.
    dg = tl.cumsum(dtotal, 0, reverse=True)
    rate = -tl.exp(tl.load(A_log + head, head < heads, 0.0).to(tl.float32))[None, :]
    shifted = tl.load(dt + token[:, None] * dt_stride + head[None, :] * dt_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head, head < heads, 0.0).to(tl.float32)[None, :]
    unbounded = softplus(shifted)
    moves = live & (unbounded >= lowest) & (unbounded <= highest)
    draw = (tl.load(dsteps + place, live, 0.0) + dg * rate) * tl.sigmoid(shifted)
    draw = tl.where(moves, draw, 0.0)
    drate = tl.where(live, dg * rate * tl.load(steps + place, live, 0.0), 0.0)
    tl.store(ddt + token[:, None] * ddt_stride + head[None, :], draw.to(ddt.dtype.element_ty), live)
    target = sums + chunk * 3 * sums_stride + head
    tl.store(target, tl.sum(drate, 0), head < heads)
    tl.store(target + sums_stride, tl.sum(draw, 0), head < heads)
    tl.store(target + 2 * sums_stride, tl.sum(tl.load(dskips + place, live, 0.0), 0), head < heads)
