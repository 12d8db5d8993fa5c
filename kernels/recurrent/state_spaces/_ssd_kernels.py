"""Kernels of the scan of Mamba 2 on chunks of 64 tokens; `_ssd_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels._fast_math import exp
from liger_models.kernels.recurrent._chunk_tiles import (
    columns_of,
    rows_of,
    segment_of,
    softplus,
    store_strided_rows,
)


@jit
def decay(g_row, g_column):
    """exp(G_row - G_column), and 1 where the row comes first: mask those. G falls, so nothing overflows."""
    return exp(tl.minimum(g_row - g_column, 0.0))


@jit
def state_of(states, nth, column, channel, P: tl.constexpr, N: tl.constexpr):
    """Rows `column` of the state number `nth`, in 64 bits: [P, N]."""
    inside = (column < P)[:, None] & (channel < N)[None, :]
    return tl.load(states + nth * P * N + column[:, None] * N + channel[None, :], inside, 0.0)


@jit
def cumulative_of(gates, heads, tokens):
    """G [heads, tokens], which follows d in `gates`."""
    return gates + tokens.to(tl.int64) * heads


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
def _chunk_output(
    y,
    x_rows,
    b_rows,
    c_rows,
    scores,
    gates,
    skip,
    state,
    rounded,
    start,
    count,
    head,
    column,
    heads,
    tokens,
    P: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the output of a chunk; return the state after it, and the same in x's dtype."""
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = x_rows.dtype
    step, g, last = decays_of(gates, start, count, heads, tokens)
    weights = tl.load(scores + row * 64 + other) * step[None, :] * decay(g[:, None], g[None, :])
    wide = x_rows.to(tl.float32)
    out = wide * skip + tl.dot(weights.to(dtype), x_rows, input_precision=PRECISION)
    out += tl.dot(c_rows, tl.trans(rounded), input_precision=PRECISION) * exp(g)[:, None]
    store_strided_rows(y, out, heads * P, start, count, head, column, P)
    written = (wide * (step * exp(last - g))[:, None]).to(dtype)
    state = state * exp(last) + tl.dot(tl.trans(written), b_rows, input_precision=PRECISION)
    # Round here: a product that nothing waits for in its iteration makes ptxas serialise all.
    return state, state.to(dtype)


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
    x_tiles,
    b_tiles,
    c_tiles,
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
    begin = tl.program_id(0) * BLOCK_P
    column = begin + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, BLOCK_N)
    inside = (column < P)[:, None] & (channel < N)[None, :]
    place = column[:, None] * N + channel[None, :]
    of_document = (document.to(tl.int64) * heads + head) * P * N
    gates += head.to(tl.int64) * tokens
    dtype = x.dtype.element_ty
    skip = tl.load(D + head).to(tl.float32)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside & (first == opening), 0.0)
    if boundaries is not None:
        before = ((boundary - 1) * heads + head) * P * N
        state += tl.load(boundaries + before + place, inside & (first > opening), 0.0)
    rounded = state.to(dtype)
    chunk_count = tl.cdiv(end - first, 64)
    # Tiles of a chunk that is not full would contain rows of the next document.
    by_tiles = chunk_count if x_tiles is None else (end - first) // 64
    for nth in tl.range(0, by_tiles, disable_licm=True):
        start = first + nth * 64
        count = end - start if x_tiles is None else 64
        x_rows = columns_of(x, x_tiles, x_stride, start, count, head, begin, BLOCK_P, P)
        b_rows = columns_of(B, b_tiles, b_stride, start, count, group, 0, BLOCK_N, N)
        c_rows = columns_of(C, c_tiles, c_stride, start, count, group, 0, BLOCK_N, N)
        tile = scores + (chunk * groups + group) * 4096
        state, rounded = _chunk_output(
            y, x_rows, b_rows, c_rows, tile, gates, skip, state, rounded, start, count, head, column, heads,
            tokens, P, PRECISION
        )  # fmt: skip
        chunk += 1
    if x_tiles is not None:  # noqa: SIM102
        if by_tiles < chunk_count:
            start = first + by_tiles * 64
            count = end - start
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            b_rows = rows_of(B, b_stride, start, count, group, channel, N)
            c_rows = rows_of(C, c_stride, start, count, group, channel, N)
            tile = scores + (chunk * groups + group) * 4096
            state, rounded = _chunk_output(
                y, x_rows, b_rows, c_rows, tile, gates, skip, state, rounded, start, count, head, column,
                heads, tokens, P, PRECISION
            )  # fmt: skip
    tl.store(final + of_document + place, state, inside & (end == ending))


@jit
def _next_state(state, values, channels, factors, last, PRECISION: tl.constexpr):
    """exp(last) state + (factors values)^T channels."""
    scaled = (values.to(tl.float32) * factors[:, None]).to(values.dtype)
    return state * exp(last) + tl.dot(tl.trans(scaled), channels, input_precision=PRECISION)


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
    x_tiles,
    dy_tiles,
    b_tiles,
    c_tiles,
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
    of_values = block % tl.cdiv(P, BLOCK_P) * BLOCK_P
    of_channels = block // tl.cdiv(P, BLOCK_P) * BLOCK_N
    column, channel = of_values + tl.arange(0, BLOCK_P), of_channels + tl.arange(0, BLOCK_N)
    inside = (column < P)[:, None] & (channel < N)[None, :]
    place = column[:, None] * N + channel[None, :]
    of_document = (document.to(tl.int64) * heads + head) * P * N
    gates += head.to(tl.int64) * tokens
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    total = 0.0
    chunk_count = tl.cdiv(end - first, 64)
    by_tiles = chunk_count if b_tiles is None else (end - first) // 64  # as in `states_kernel`
    if back:
        if dfinal is not None:
            state += tl.load(dfinal + of_document + place, inside & (end == ending), 0.0)
        if not LOCAL and boundaries is not None:
            after = boundaries + ((boundary_count + boundary) * heads + head) * P * N
            state += tl.load(after + place, inside & (end < ending), 0.0)
        chunk += chunk_count - 1
        if b_tiles is not None:  # noqa: SIM102
            if by_tiles < chunk_count:
                start = first + by_tiles * 64
                _, g, last = decays_of(gates, start, end - start, heads, tokens)
                dy_rows = rows_of(dy, dy_stride, start, end - start, head, column, P)
                c_rows = rows_of(C, c_stride, start, end - start, group, channel, N)
                if not LOCAL:
                    here = states + ((chunks + chunk) * held + local) * P * N
                    tl.store(here + place, state.to(states.dtype.element_ty), inside)
                state = _next_state(state, dy_rows, c_rows, exp(g), last, PRECISION)
                chunk -= 1
        for nth in range(0, by_tiles):
            start = first + (by_tiles - 1 - nth) * 64
            count = end - start if c_tiles is None else 64
            _, g, last = decays_of(gates, start, count, heads, tokens)
            dy_rows = columns_of(dy, dy_tiles, dy_stride, start, count, head, of_values, BLOCK_P, P)
            c_rows = columns_of(C, c_tiles, c_stride, start, count, group, of_channels, BLOCK_N, N)
            if not LOCAL:
                here = states + ((chunks + chunk) * held + local) * P * N
                tl.store(here + place, state.to(states.dtype.element_ty), inside)
            state = _next_state(state, dy_rows, c_rows, exp(g), last, PRECISION)
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
        for nth in range(0, by_tiles):
            start = first + nth * 64
            count = end - start if b_tiles is None else 64
            step, g, last = decays_of(gates, start, count, heads, tokens)
            x_rows = columns_of(x, x_tiles, x_stride, start, count, head, of_values, BLOCK_P, P)
            b_rows = columns_of(B, b_tiles, b_stride, start, count, group, of_channels, BLOCK_N, N)
            if not LOCAL:
                here = states + (chunk * held + local) * P * N
                tl.store(here + place, state.to(states.dtype.element_ty), inside)
            state = _next_state(state, x_rows, b_rows, step * exp(last - g), last, PRECISION)
            total += last
            chunk += 1
        if b_tiles is not None:  # noqa: SIM102
            if by_tiles < chunk_count:
                start = first + by_tiles * 64
                step, g, last = decays_of(gates, start, end - start, heads, tokens)
                x_rows = rows_of(x, x_stride, start, end - start, head, column, P)
                b_rows = rows_of(B, b_stride, start, end - start, group, channel, N)
                if not LOCAL:
                    here = states + (chunk * held + local) * P * N
                    tl.store(here + place, state.to(states.dtype.element_ty), inside)
                state = _next_state(state, x_rows, b_rows, step * exp(last - g), last, PRECISION)
                total += last
        if LOCAL:
            tl.store(boundaries + (boundary * heads + head) * P * N + place, state, inside)
            tl.store(transfers + boundary * heads + head, exp(total), block == 0)
