"""Kernels of the gradients of Mamba 2's scan; `_ssd_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    rows_of,
    segment_size,
    softplus,
    store_numbers,
    store_strided_rows,
)
from liger_models.kernels.recurrent.state_spaces._ssd_kernels import (
    cumulative_of,
    decay,
    decays_of,
    state_of,
)


@jit
def group_grads_kernel(
    x,
    B,
    C,
    dy,
    gates,
    ranges,
    states,
    dB,
    dC,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    db_stride,
    tokens,
    heads,
    chunks,
    first_head,
    held,
    PER_GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write BLOCK_N columns of dB and dC, over a part of the SHARED heads of a group from `first_head` on.
    Products come first and decays after them, so that the products read their operands from shared memory.
    """
    chunk, part = tl.program_id(0).to(tl.int64), tl.program_id(1) % PARTS
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    first = tl.program_id(1) // PARTS * SHARED + part * (SHARED // PARTS)
    group = (first_head + first) // PER_GROUP
    channel = tl.arange(0, BLOCK_N)
    if BLOCK_N < N:
        channel += tl.program_id(2) * BLOCK_N
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dc_rows = tl.zeros([64, BLOCK_N], tl.float32)
    db_rows = tl.zeros([64, BLOCK_N], tl.float32)
    dscores = tl.zeros([64, 64], tl.float32)
    gates += (first_head + first).to(tl.int64) * tokens
    for nth in range(0, SHARED // PARTS):
        local = first + nth
        head = first_head + local
        step, g, last = decays_of(gates + nth * tokens, start, count, heads, tokens)
        between = step[None, :] * decay(g[:, None], g[None, :])
        for begin in tl.static_range(0, P, BLOCK_P):
            column = begin + tl.arange(0, BLOCK_P)
            x_rows = rows_of(x, x_stride, start, count, head, column, P)
            dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
            state = state_of(states, chunk * held + local, column, channel, P, N)
            dstate = state_of(states, (chunks + chunk) * held + local, column, channel, P, N)
            dscores += tl.dot(dy_rows, tl.trans(x_rows), input_precision=PRECISION) * between
            dc_rows += tl.dot(dy_rows, state, input_precision=PRECISION) * tl.exp(g)[:, None]
            db_rows += tl.dot(x_rows, dstate, input_precision=PRECISION) * (step * tl.exp(last - g))[:, None]
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    rounded = tl.where(row >= other, dscores, 0.0).to(x.dtype.element_ty)
    dc_rows += tl.dot(rounded, b_rows, input_precision=PRECISION)
    db_rows += tl.dot(tl.trans(rounded), c_rows, input_precision=PRECISION)
    dC += part.to(tl.int64) * tokens * db_stride
    dB += part.to(tl.int64) * tokens * db_stride
    if ADD:
        dc_rows += rows_of(dC, db_stride, start, count, group, channel, N)
        db_rows += rows_of(dB, db_stride, start, count, group, channel, N)
    store_strided_rows(dC, dc_rows, db_stride, start, count, group, channel, N)
    store_strided_rows(dB, db_rows, db_stride, start, count, group, channel, N)


@jit
def _last_chunk(
    document,
    cu_seqlens,
    segments,
    first_segments,
    segment_count,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
):
    """The first token, the number of tokens and the number of a document's last chunk if it is not full, else
    of no tokens.
    """
    end = tl.load(cu_seqlens + document + 1)
    length = end - tl.load(cu_seqlens + document)
    before = tl.maximum(length - 1, 0)  # tokens before the last
    size = segment_size(length, SEGMENT, MOST)
    segment = tl.load(first_segments + document) + before // size
    chunk = tl.load(segments + 3 * segment_count + segment) + before % size // 64
    return end - length % 64, length % 64, chunk


@jit
def _store_gate_grads(
    dgates,
    sums,
    dscores,
    scores,
    own_score,
    read,
    dstep,
    through,
    step,
    g,
    last,
    head,
    chunk,
    start,
    count,
    tokens,
    heads,
    TENSOR_MEMORY: tl.constexpr,
):
    """Write a head's dG and dd, and the chunk's dD, from sums over its channels."""
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    last_row = tl.arange(0, 64) == tl.minimum(count, 64) - 1
    numbers = head.to(tl.int64) * tokens
    own = tl.sum(tl.where(row == other, dscores, 0.0), 1)
    product = dscores * scores
    inner = tl.sum(product, 1)
    # Nor does the last token's write into the next state.
    share = tl.where(last_row, 0.0, dstep * step)
    dtotal = read * tl.exp(g) + tl.sum(product * step[:, None], 0) - inner * step - share
    all_shares = tl.sum(share[None, :], 1) if TENSOR_MEMORY else tl.sum(share, 0)
    dtotal += tl.where(last_row, all_shares + tl.exp(last) * through, 0.0)
    store_numbers(cumulative_of(dgates + numbers, heads, tokens), dtotal, start, count, 0, 1)
    store_numbers(dgates + numbers, dstep + inner + own * own_score, start, count, 0, 1)
    tl.store(sums + (chunk * 3 + 2) * heads + head, tl.sum(own))


@jit
def head_grads_kernel(
    x,
    B,
    C,
    D,
    dy,
    gates,
    ranges,
    cu_seqlens,
    segments,
    first_segments,
    states,
    dx,
    dgates,
    sums,
    x_stride,
    b_stride,
    c_stride,
    dy_stride,
    dx_stride,
    tokens,
    heads,
    chunks,
    first_head,
    held,
    segment_count,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TENSOR_MEMORY: tl.constexpr,
    LAST: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write a head's dX, dG, dd and the chunk's dD. Tiles of scores are transposed: their rows are keys.

    With LAST, only for those last chunks of documents that are not full, over documents instead of chunks.
    With TENSOR_MEMORY, a sum is over two dimensions: Triton 3.7 finds no layout for it over one.
    """
    nth, local = tl.program_id(0) // held, tl.program_id(0) % held
    if LAST:
        start, count, nth = _last_chunk(
            nth, cu_seqlens, segments, first_segments, segment_count, SEGMENT, MOST
        )
    else:
        start = tl.load(ranges + nth)
        count = tl.load(ranges + chunks + nth) - start
    if count <= 0:
        return
    chunk = nth.to(tl.int64)
    head = first_head + local
    group = head // PER_GROUP
    channel = tl.arange(0, BLOCK_N)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    numbers = head.to(tl.int64) * tokens
    step, g, last = decays_of(gates + numbers, start, count, heads, tokens)
    skip = tl.load(D + head).to(tl.float32)
    left = tl.exp(last - g)
    b_rows = rows_of(B, b_stride, start, count, group, channel, N)
    c_rows = rows_of(C, c_stride, start, count, group, channel, N)
    scores = tl.dot(b_rows, tl.trans(c_rows), input_precision=PRECISION)
    for at in tl.static_range(BLOCK_N, N, BLOCK_N):  # further blocks, where shared memory is small
        more_b = rows_of(B, b_stride, start, count, group, at + channel, N)
        more_c = rows_of(C, c_stride, start, count, group, at + channel, N)
        scores += tl.dot(more_b, tl.trans(more_c), input_precision=PRECISION)
    own_score = tl.sum(tl.where(row == other, scores, 0.0), 1)
    # A token's own score does not decay: without it there is no cancellation in the sums for dG.
    scores = tl.where(row < other, scores * decay(g[None, :], g[:, None]), 0.0)
    weights = scores.to(x.dtype.element_ty)
    dscores = tl.zeros([64, 64], tl.float32)
    read = tl.zeros([64], tl.float32)
    dstep = tl.zeros([64], tl.float32)
    through = 0.0
    for begin in tl.static_range(0, P, BLOCK_P):
        column = begin + tl.arange(0, BLOCK_P)
        x_rows = rows_of(x, x_stride, start, count, head, column, P)
        dy_rows = rows_of(dy, dy_stride, start, count, head, column, P)
        state = state_of(states, chunk * held + local, column, channel, P, N)
        dstate = state_of(states, (chunks + chunk) * held + local, column, channel, P, N)
        through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        dwide = dy_rows.to(tl.float32)
        dscores += tl.dot(x_rows, tl.trans(dy_rows), input_precision=PRECISION)
        read += tl.sum(tl.dot(c_rows, tl.trans(state), input_precision=PRECISION) * dwide, 1)
        by_state = tl.dot(b_rows, tl.trans(dstate), input_precision=PRECISION) * left[:, None]
        for at in tl.static_range(BLOCK_N, N, BLOCK_N):
            state = state_of(states, chunk * held + local, column, at + channel, P, N)
            dstate = state_of(states, (chunks + chunk) * held + local, column, at + channel, P, N)
            through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            more_b = rows_of(B, b_stride, start, count, group, at + channel, N)
            more_c = rows_of(C, c_stride, start, count, group, at + channel, N)
            read += tl.sum(tl.dot(more_c, tl.trans(state), input_precision=PRECISION) * dwide, 1)
            by_state += tl.dot(more_b, tl.trans(dstate), input_precision=PRECISION) * left[:, None]
        dstep += tl.sum(by_state * x_rows.to(tl.float32), 1)
        dwritten = by_state + tl.dot(weights, dy_rows, input_precision=PRECISION)
        dx_rows = dwritten * step[:, None] + dwide * (step * own_score + skip)[:, None]
        store_strided_rows(dx, dx_rows, dx_stride, start, count, head, column, P)
    _store_gate_grads(
        dgates, sums, dscores, scores, own_score, read, dstep, through, step, g, last, head, chunk, start,
        count, tokens, heads, TENSOR_MEMORY
    )  # fmt: skip


@jit
def tiled_head_grads_kernel(
    D,
    gates,
    ranges,
    dx,
    dgates,
    sums,
    x_tiles,
    b_tiles,
    c_tiles,
    dy_tiles,
    state_tiles,
    dx_stride,
    tokens,
    heads,
    chunks,
    first_head,
    held,
    PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARED: tl.constexpr,
):
    """As `head_grads_kernel`, for SHARED heads of a group, one after another: B, C and their scores are the
    same for all, and the copy engine fetches the rest of a head meanwhile. In a chunk that is not full its
    tiles would contain rows of the next document.
    """
    programs = held // SHARED
    chunk, first = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs * SHARED
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count < 64:
        return
    group = (first_head + first) // PER_GROUP
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    b_blocks, c_blocks = (), ()
    raw = tl.zeros([64, 64], tl.float32)
    for at in tl.static_range(0, N, BLOCK_N):
        b_rows = b_tiles.load([start, group * N + at])
        c_rows = c_tiles.load([start, group * N + at])
        raw += tl.dot(b_rows, tl.trans(c_rows), input_precision=PRECISION)
        b_blocks += (b_rows,)  # type: ignore[assignment]
        c_blocks += (c_rows,)  # type: ignore[assignment]
    own_score = tl.sum(tl.where(row == other, raw, 0.0), 1)
    for nth in tl.range(0, SHARED, num_stages=2, disable_licm=True):
        local = first + nth
        head = first_head + local
        numbers = head.to(tl.int64) * tokens
        step, g, last = decays_of(gates + numbers, start, count, heads, tokens)
        skip = tl.load(D + head).to(tl.float32)
        left = tl.exp(last - g)
        # A token's own score does not decay: without it there is no cancellation in the sums for dG.
        scores = tl.where(row < other, raw * decay(g[None, :], g[:, None]), 0.0)
        weights = scores.to(dx.dtype.element_ty)
        dscores = tl.zeros([64, 64], tl.float32)
        read = tl.zeros([64], tl.float32)
        dstep = tl.zeros([64], tl.float32)
        through = 0.0
        for begin in tl.static_range(0, P, BLOCK_P):
            x_rows = x_tiles.load([start, head * P + begin])
            dy_rows = dy_tiles.load([start, head * P + begin])
            place = ((chunk * held + local) * P + begin).to(tl.int32)
            by_state = tl.zeros([64, BLOCK_P], tl.float32)
            seen = tl.zeros([64, BLOCK_P], tl.float32)
            for at in tl.static_range(0, N, BLOCK_N):
                state = state_tiles.load([place, at])
                dstate = state_tiles.load([place + chunks * held * P, at])
                through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
                b_rows, c_rows = b_blocks[at // BLOCK_N], c_blocks[at // BLOCK_N]
                by_state += tl.dot(b_rows, tl.trans(dstate), input_precision=PRECISION)
                seen += tl.dot(c_rows, tl.trans(state), input_precision=PRECISION)
            dwide = dy_rows.to(tl.float32)
            read += tl.sum(seen * dwide, 1)
            by_state *= left[:, None]
            dstep += tl.sum(by_state * x_rows.to(tl.float32), 1)
            dwritten = by_state + tl.dot(weights, dy_rows, input_precision=PRECISION)
            dx_rows = dwritten * step[:, None] + dwide * (step * own_score + skip)[:, None]
            column = begin + tl.arange(0, BLOCK_P)
            store_strided_rows(dx, dx_rows, dx_stride, start, count, head, column, P)
            dscores += tl.dot(x_rows, tl.trans(dy_rows), input_precision=PRECISION)
        _store_gate_grads(
            dgates, sums, dscores, scores, own_score, read, dstep, through, step, g, last, head, chunk, start,
            count, tokens, heads, False
        )  # fmt: skip


@jit
def gate_grads_kernel(
    dt,
    A_log,
    dt_bias,
    gates,
    dgates,
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
    # All loads first, which would wait behind the sum.
    dcumulative = tl.load(cumulative_of(dgates, heads, tokens) + place, live, 0.0)
    dstep, step = tl.load(dgates + place, live, 0.0), tl.load(gates + place, live, 0.0)
    rate = -tl.exp(tl.load(A_log + head, head < heads, 0.0).to(tl.float32))[None, :]
    shifted = tl.load(dt + token[:, None] * dt_stride + head[None, :] * dt_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head, head < heads, 0.0).to(tl.float32)[None, :]
    # A token's g is part of G of all later tokens of the chunk.
    dg = tl.cumsum(dcumulative, 0, reverse=True)
    unbounded = softplus(shifted)
    moves = live & (unbounded >= lowest) & (unbounded <= highest)
    draw = (dstep + dg * rate) * tl.sigmoid(shifted)
    draw = tl.where(moves, draw, 0.0)
    drate = tl.where(live, dg * rate * step, 0.0)
    tl.store(ddt + token[:, None] * ddt_stride + head[None, :], draw.to(ddt.dtype.element_ty), live)
    target = sums + chunk * 3 * heads + head
    tl.store(target, tl.sum(drate, 0), head < heads)
    tl.store(target + heads, tl.sum(draw, 0), head < heads)
