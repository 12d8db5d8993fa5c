"""Kernels of the scan of Mamba 2 on chunks of 64 tokens; `_ssd_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    rows_of,
    segment_of,
    softplus,
    store_strided_rows,
)


@jit
def decay(g_row, g_column):
    """exp(G_row - G_column), and 1 where the row comes first: mask those. G falls, so nothing overflows."""
    return tl.exp(tl.minimum(g_row - g_column, 0.0))


@jit
def state_of(states, nth, column, channel, P: tl.constexpr, N: tl.constexpr):
    """Rows `column` of the state number `nth`, in 64 bits: [P, N]."""
    inside = (column < P)[:, None] & (channel < N)[None, :]
    return tl.load(states + nth * P * N + column[:, None] * N + channel[None, :], inside, 0.0)


@jit
def cumulative_of(gates, heads, tokens):
    """G [heads, tokens], which follows d in `gates`."""
    return gates + heads * tokens


@jit
def decays_of(gates, start, count, heads, tokens):
    """d and G of a chunk's tokens, and G of the last, from a head's d in `gates`. G is constant past the last
    token; nothing is read if count <= 0.
    """
    row = tl.arange(0, 64)
    place = gates + start.to(tl.int64) + row
    cumulative = cumulative_of(place, heads, tokens)
    step = tl.load(place, row < count, 0.0)
    ending = cumulative_of(gates, heads, tokens) + (start + tl.minimum(count, 64) - 1).to(tl.int64)
    last = tl.load(ending, count > 0, 0.0)
    return step, tl.where(row < count, tl.load(cumulative, row < count, 0.0), last), last


@jit
def prepare_kernel(
    dt,
    A_log,
    dt_bias,
    gates,
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
    """Write d and G of a chunk: [2, heads, tokens]."""
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
    tl.store(gates + place, step, live)
    tl.store(cumulative_of(gates, heads, tokens) + place, total, live)


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
    gates,
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
    of_document = (document.to(tl.int64) * heads + head) * P * N
    gates += head.to(tl.int64) * tokens
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
        step, g, last = decays_of(gates, start, count, heads, tokens)
        x_rows = rows_of(x, x_stride, start, count, head, column, P)
        b_rows = rows_of(B, b_stride, start, count, group, channel, N)
        c_rows = rows_of(C, c_stride, start, count, group, channel, N)
        tile = tl.load(scores + (chunk * groups + group) * 4096 + row * 64 + other)
        weights = tile * step[None, :] * decay(g[:, None], g[None, :])
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
    gates,
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
    tokens,
    heads,
    chunks,
    boundary_count,
    segment_count,
    first_head,
    held,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    LOCAL: tl.constexpr,
    BACK: tl.constexpr,
):
    """Pass a block of a head's state over the chunks of a segment, or the state's gradient back, for heads
    from `first_head` on.

    The former writes S of every chunk to the first of `states` [2, chunks, held, ...], the latter dS' to the
    second. With LOCAL they start from zero (at a document's ends, from what is given there) and write what
    leaves the segment to `boundaries` [2, boundaries, ...], and the segment's decay to `transfers`. Without,
    they start from `boundaries`, the true states and gradients. With BACK, gradients alone.
    """
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    blocks = tl.cdiv(P, BLOCK_P) * tl.cdiv(N, BLOCK_N)
    nth_block = tl.program_id(0) + BACK * blocks
    back = nth_block >= blocks
    block = tl.where(back, nth_block - blocks, nth_block)
    leaves = tl.where(back, first > opening, end < ending)  # for another segment of the document
    if (document < 0) | (LOCAL & (leaves == 0)):
        return
    local, head = tl.program_id(1), first_head + tl.program_id(1)
    group = head // PER_GROUP
    column = block % tl.cdiv(P, BLOCK_P) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = block // tl.cdiv(P, BLOCK_P) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (column < P)[:, None] & (channel < N)[None, :]
    place = column[:, None] * N + channel[None, :]
    of_document = (document.to(tl.int64) * heads + head) * P * N
    gates += head.to(tl.int64) * tokens
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    total = 0.0
    chunk_count = tl.cdiv(end - first, 64)
    if back:
        chunk += chunk_count - 1
        if dfinal is not None:
            state += tl.load(dfinal + of_document + place, inside & (end == ending), 0.0)
        if not LOCAL and boundaries is not None:
            after = boundaries + ((boundary_count + boundary) * heads + head) * P * N
            state += tl.load(after + place, inside & (end < ending), 0.0)
        for nth in range(0, chunk_count):
            start = first + (chunk_count - 1 - nth) * 64
            count = end - start
            _, g, last = decays_of(gates, start, count, heads, tokens)
            dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
            c_rows = rows_of(C, c_stride, start, count, group, channel, N)
            if not LOCAL:
                here = states + ((chunks + chunk) * held + local) * P * N
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
        for nth in range(0, chunk_count):
            start = first + nth * 64
            count = end - start
            step, g, last = decays_of(gates, start, count, heads, tokens)
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            b_rows = rows_of(B, b_stride, start, count, group, channel, N)
            if not LOCAL:
                here = states + (chunk * held + local) * P * N
                tl.store(here + place, state.to(states.dtype.element_ty), inside)
            written = (x_rows.to(tl.float32) * (step * tl.exp(last - g))[:, None]).to(x.dtype.element_ty)
            state = state * tl.exp(last) + tl.dot(tl.trans(written), b_rows, input_precision=PRECISION)
            total += last
            chunk += 1
        if LOCAL:
            tl.store(boundaries + (boundary * heads + head) * P * N + place, state, inside)
            tl.store(transfers + boundary * heads + head, tl.exp(total), block == 0)
