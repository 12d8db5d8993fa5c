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
def state_of(states, nth, column, channel, P: tl.constexpr, N: tl.constexpr):
    """Rows `column` of the state number `nth`, in 64 bits: [P, N]."""
    inside = (column < P)[:, None] & (channel < N)[None, :]
    return tl.load(states + nth * P * N + column[:, None] * N + channel[None, :], inside, 0.0)


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
def scores_kernel(
    B,
    C,
    ranges,
    scores,
    b_stride,
    c_stride,
    chunks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write C B^T of a chunk and group, zero above the diagonal: [chunks, groups, 64, 64]."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    channel = tl.arange(0, BLOCK_N)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    found = tl.where(row >= other, tl.dot(c_rows, tl.trans(b_rows), input_precision=PRECISION), 0.0)
    tile = scores + (chunk.to(tl.int64) * tl.num_programs(1) + group) * 4096
    tl.store(tile + row * 64 + other, found)


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
    scores,
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
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if document < 0:
        return
    head = tl.program_id(1)
    group, groups = head // PER_GROUP, heads // PER_GROUP
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
    rounded = state.to(dtype)
    for nth in range(0, tl.cdiv(end - first, 64)):
        start = first + nth * 64
        count = end - start
        x_rows = rows_of(x, x_stride, start, count, head, column, P)
        b_rows = rows_of(B, b_stride, start, count, group, channel, N)
        c_rows = rows_of(C, c_stride, start, count, group, channel, N)
        g, last = running_decay(cumulative, start, count, 0, 1)
        step = numbers_of(steps, start, count, 0, 1)
        tile = scores + (chunk * groups + group) * 4096
        weights = tl.load(tile + row * 64 + other) * step[None, :] * _decay(g[:, None], g[None, :])
        wide = x_rows.to(tl.float32)
        out = wide * skip + tl.dot(weights.to(dtype), x_rows, input_precision=PRECISION)
        out += tl.dot(c_rows, tl.trans(rounded), input_precision=PRECISION) * tl.exp(g)[:, None]
        store_strided_rows(y, out, heads * P, start, count, head, column, P)
        written = (wide * (step * tl.exp(last - g))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(written), b_rows, input_precision=PRECISION)
        # Read the state here: a product that nothing waits for in its iteration makes ptxas serialise all.
        rounded = state.to(dtype)
        chunk += 1
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
def group_grads_kernel(
    x,
    B,
    C,
    dy,
    steps,
    cumulative,
    ranges,
    states,
    dB,
    dC,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    db_stride,
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
    """Write dB and dC, over a part of a group's heads. Products come first and decays after them, so that
    the products read their operands from shared memory.
    """
    chunk, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    channel = tl.arange(0, BLOCK_N)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dc_rows = tl.zeros([64, BLOCK_N], tl.float32)
    db_rows = tl.zeros([64, BLOCK_N], tl.float32)
    dscores = tl.zeros([64, 64], tl.float32)
    for nth in range(0, PER_GROUP // PARTS):
        head = group * PER_GROUP + part * (PER_GROUP // PARTS) + nth
        numbers = head.to(tl.int64) * tokens
        g, last = running_decay(cumulative + numbers, start, count, 0, 1)
        step = numbers_of(steps + numbers, start, count, 0, 1)
        between = step[None, :] * _decay(g[:, None], g[None, :])
        for begin in tl.static_range(0, P, BLOCK_P):
            column = begin + tl.arange(0, BLOCK_P)
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
            state = state_of(states, chunk * heads + head, column, channel, P, N)
            dstate = state_of(states, (chunks + chunk) * heads + head, column, channel, P, N)
            dscores += tl.dot(dy_rows, tl.trans(x_rows), input_precision=PRECISION) * between
            dc_rows += tl.dot(dy_rows, state, input_precision=PRECISION) * tl.exp(g)[:, None]
            db_rows += tl.dot(x_rows, dstate, input_precision=PRECISION) * (step * tl.exp(last - g))[:, None]
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    rounded = tl.where(row >= other, dscores, 0.0).to(x.dtype.element_ty)
    dc_rows += tl.dot(rounded, b_rows, input_precision=PRECISION)
    db_rows += tl.dot(tl.trans(rounded), c_rows, input_precision=PRECISION)
    dC += part.to(tl.int64) * tokens * dc_stride
    dB += part.to(tl.int64) * tokens * db_stride
    if ADD:
        dc_rows += rows_of(dC, dc_stride, start, count, group, channel, N)
        db_rows += rows_of(dB, db_stride, start, count, group, channel, N)
    store_strided_rows(dC, dc_rows, dc_stride, start, count, group, channel, N)
    store_strided_rows(dB, db_rows, db_stride, start, count, group, channel, N)


@jit
def head_grads_kernel(
    x,
    B,
    C,
    D,
    dy,
    steps,
    cumulative,
    ranges,
    states,
    dx,
    dcumulative,
    dsteps,
    dskips,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    dx_stride,
    skip_stride,
    tokens,
    heads,
    chunks,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write a head's dX, dG, dd and the chunk's dD. Tiles of scores are transposed: their rows are keys."""
    chunk, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    group = head // PER_GROUP
    channel = tl.arange(0, BLOCK_N)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    last_row = tl.arange(0, 64) == tl.minimum(count, 64) - 1
    numbers = head.to(tl.int64) * tokens
    g, last = running_decay(cumulative + numbers, start, count, 0, 1)
    step = numbers_of(steps + numbers, start, count, 0, 1)
    skip = tl.load(D + head).to(tl.float32)
    left = tl.exp(last - g)
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    scores = tl.dot(b_rows, tl.trans(c_rows), input_precision=PRECISION)
    own_score = tl.sum(tl.where(row == other, scores, 0.0), 1)
    # A token's own score does not decay: without it there is no cancellation in the sums for dG.
    scores = tl.where(row < other, scores * _decay(g[None, :], g[:, None]), 0.0)
    weights = scores.to(x.dtype.element_ty)
    dscores = tl.zeros([64, 64], tl.float32)
    read = tl.zeros([64], tl.float32)
    dstep = tl.zeros([64], tl.float32)
    through = 0.0
    for begin in tl.static_range(0, P, BLOCK_P):
        column = begin + tl.arange(0, BLOCK_P)
        x_rows = rows_of(x, x_stride, start, count, head, column, P)
        dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
        state = state_of(states, chunk * heads + head, column, channel, P, N)
        dstate = state_of(states, (chunks + chunk) * heads + head, column, channel, P, N)
        through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        dwide = dy_rows.to(tl.float32)
        dscores += tl.dot(x_rows, tl.trans(dy_rows), input_precision=PRECISION)
        read += tl.sum(tl.dot(c_rows, tl.trans(state), input_precision=PRECISION) * dwide, 1)
        by_state = tl.dot(b_rows, tl.trans(dstate), input_precision=PRECISION) * left[:, None]
        dstep += tl.sum(by_state * x_rows.to(tl.float32), 1)
        dwritten = by_state + tl.dot(weights, dy_rows, input_precision=PRECISION)
        dx_rows = dwritten * step[:, None] + dwide * (step * own_score + skip)[:, None]
        store_strided_rows(dx, dx_rows, dx_stride, start, count, head, column, P)
    own = tl.sum(tl.where(row == other, dscores, 0.0), 1)
    product = dscores * scores
    inner = tl.sum(product, 1)
    # Nor does the last token's write into the next state.
    share = tl.where(last_row, 0.0, dstep * step)
    dtotal = read * tl.exp(g) + tl.sum(product * step[:, None], 0) - inner * step - share
    dtotal += tl.where(last_row, tl.sum(share, 0) + tl.exp(last) * through, 0.0)
    store_numbers(dcumulative + numbers, dtotal, start, count, 0, 1)
    store_numbers(dsteps + numbers, dstep + inner + own * own_score, start, count, 0, 1)
    tl.store(dskips + chunk * skip_stride + head, tl.sum(own))


@jit
def gate_grads_kernel(
    dt,
    A_log,
    dt_bias,
    steps,
    dcumulative,
    dsteps,
    ranges,
    ddt,
    sums,
    dt_stride,
    dt_head,
    ddt_stride,
    tokens,
    chunks,
    heads,
    lowest,
    highest,
    BLOCK_HEADS: tl.constexpr,
):
    """Write ddt and the chunk's sums for dA_log and ddt_bias."""
    chunk = tl.program_id(0)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    token = start.to(tl.int64) + tl.arange(0, 64)
    live = (tl.arange(0, 64) < count)[:, None] & (head < heads)[None, :]
    place = head[None, :].to(tl.int64) * tokens + token[:, None]
    # A token's g is part of G of all later tokens of the chunk.
    dg = tl.cumsum(tl.load(dcumulative + place, live, 0.0), 0, reverse=True)
    rate = -tl.exp(tl.load(A_log + head, head < heads, 0.0).to(tl.float32))[None, :]
    shifted = tl.load(dt + token[:, None] * dt_stride + head[None, :] * dt_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head, head < heads, 0.0).to(tl.float32)[None, :]
    unbounded = softplus(shifted)
    moves = live & (unbounded >= lowest) & (unbounded <= highest)
    draw = (tl.load(dsteps + place, live, 0.0) + dg * rate) * tl.sigmoid(shifted)
    draw = tl.where(moves, draw, 0.0)
    drate = tl.where(live, dg * rate * tl.load(steps + place, live, 0.0), 0.0)
    tl.store(ddt + token[:, None] * ddt_stride + head[None, :], draw.to(ddt.dtype.element_ty), live)
    target = sums + chunk * 3 * heads + head
    tl.store(target, tl.sum(drate, 0), head < heads)
    tl.store(target + heads, tl.sum(draw, 0), head < heads)
