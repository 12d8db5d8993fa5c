"""Triton kernels of `compressed_keys.py`.

A program of the first two holds up to BLOCK_H heads of one query, which see the same keys: so no score is
masked for one row and not for another, and chosen keys are gathered. A program of the third holds BLOCK_K
keys, and visits the queries that see any of them, or have chosen any, BLOCK_H heads at a time. Compressed
keys are seen by many queries, so several programs share these, and each stores a sum of its own. Scores and
`lse` are in units of ln(2).
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.attention._tiles import load_rows


@jit
def compressed_forward_kernel(
    q,
    keys,
    compressed,
    sinks,
    start,
    seen,
    chosen,
    out,
    lse,
    window,
    scale,
    most,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    query, head = _query_and_head(HEADS, BLOCK_H)
    MASKED: tl.constexpr = HEADS % BLOCK_H != 0
    heads = head + tl.arange(0, BLOCK_H)
    rows = query * HEADS * DIM
    q_tile = load_rows(q + rows, head, DIM, HEADS, MASKED, DIM, BLOCK_DIM, BLOCK_H)
    # The sink is one more key, whose value is zero.
    largest = tl.load(sinks + heads, heads < HEADS, 0.0).to(tl.float32) * 1.4426950408889634
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    accumulator = tl.zeros([BLOCK_H, BLOCK_DIM], tl.float32)
    near, of_window, far, of_compressed = _keys_seen(query, start, seen, chosen, window, most)
    before = tl.cdiv(of_window, BLOCK_K)
    for i in range(0, before + tl.cdiv(of_compressed, BLOCK_K)):
        k_tile, there = _load_keys(
            keys,
            compressed,
            chosen,
            query,
            near,
            of_window,
            far,
            of_compressed,
            most,
            i,
            before,
            DIM,
            BLOCK_DIM,
            BLOCK_K,
        )
        products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        scores = tl.where(there[None, :], products * (scale * 1.4426950408889634), -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        decay = tl.exp2(largest - larger)
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(k_tile.dtype), k_tile, accumulator, input_precision="ieee")
        largest = larger
    tl.store(lse + query * HEADS + heads, largest + tl.log2(total), heads < HEADS)
    _store_rows(out + rows, accumulator / total[:, None], head, HEADS, DIM, BLOCK_DIM, BLOCK_H)


@jit
def compressed_query_gradient_kernel(
    q,
    keys,
    compressed,
    start,
    seen,
    chosen,
    out,
    dout,
    lse,
    delta,
    dq,
    window,
    scale,
    most,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute dq, and delta for the gradients of keys."""
    query, head = _query_and_head(HEADS, BLOCK_H)
    MASKED: tl.constexpr = HEADS % BLOCK_H != 0
    heads = head + tl.arange(0, BLOCK_H)
    rows = query * HEADS * DIM
    dout_tile = load_rows(dout + rows, head, DIM, HEADS, MASKED, DIM, BLOCK_DIM, BLOCK_H)
    out_tile = load_rows(out + rows, head, DIM, HEADS, MASKED, DIM, BLOCK_DIM, BLOCK_H)
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + query * HEADS + heads, row_delta, heads < HEADS)
    q_tile = load_rows(q + rows, head, DIM, HEADS, MASKED, DIM, BLOCK_DIM, BLOCK_H)
    row_lse = tl.load(lse + query * HEADS + heads, heads < HEADS, float("inf"))
    gradient = tl.zeros([BLOCK_H, BLOCK_DIM], tl.float32)
    near, of_window, far, of_compressed = _keys_seen(query, start, seen, chosen, window, most)
    before = tl.cdiv(of_window, BLOCK_K)
    for i in range(0, before + tl.cdiv(of_compressed, BLOCK_K)):
        k_tile, there = _load_keys(
            keys,
            compressed,
            chosen,
            query,
            near,
            of_window,
            far,
            of_compressed,
            most,
            i,
            before,
            DIM,
            BLOCK_DIM,
            BLOCK_K,
        )
        products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        weights = tl.exp2(products * (scale * 1.4426950408889634) - row_lse[:, None])
        weights = tl.where(there[None, :], weights, 0.0)
        dweights = tl.dot(dout_tile, k_tile.T, input_precision="ieee")
        dscores = (weights * (dweights - row_delta[:, None])).to(k_tile.dtype)
        gradient = tl.dot(dscores, k_tile, gradient, input_precision="ieee")
    _store_rows(dq + rows, gradient * scale, head, HEADS, DIM, BLOCK_DIM, BLOCK_H)


@jit
def compressed_key_gradient_kernel(
    q,
    dout,
    source,
    start,
    seen,
    visitors,
    listed,
    bits,
    lse,
    delta,
    dkeys,
    tokens,
    number_of_keys,
    first_tile,
    window,
    scale,
    words,
    programs,
    WINDOWED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum the gradients of a tile of keys over a piece of the queries that see it, in a fixed order.

    `visitors` [tiles, 2] is the range of queries of each tile. For chosen keys `listed` [tiles, T] holds the
    queries instead, of which that range has the places, and `bits` [T, words] the keys, both from tile
    `first_tile` on.
    """
    MASKED: tl.constexpr = HEADS % BLOCK_H != 0
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    tile = first_tile + tl.program_id(0) // programs
    piece = tl.program_id(0) % programs
    column = tile * BLOCK_K
    own = column + tl.arange(0, BLOCK_K)
    k_tile = load_rows(source, column, DIM, number_of_keys, True, DIM, BLOCK_DIM, BLOCK_K)
    if WINDOWED:
        begin, end = column, tl.minimum(column + BLOCK_K + window - 1, number_of_keys)
    else:
        begin, end = tl.load(visitors + 2 * tile).to(tl.int32), tl.load(visitors + 2 * tile + 1).to(tl.int32)
    each = tl.cdiv(end - begin, programs)
    begin = begin + piece * each
    end = tl.minimum(begin + each, end)
    if listed is not None:
        listed += (tile - first_tile).to(tl.int64) * tokens
        word = (tile - first_tile) * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    gradient = tl.zeros([BLOCK_K, BLOCK_DIM], tl.float32)
    for i in range(begin * BLOCKS, end * BLOCKS):
        query = tl.cast(i // BLOCKS, tl.int64)
        if listed is not None:
            query = tl.load(listed + query).to(tl.int64)
        if WINDOWED:
            there = (own <= query) & (own > query - window) & (own >= tl.load(start + query))
        else:
            there = (own >= tl.load(seen + 2 * query)) & (own < tl.load(seen + 2 * query + 1))
        if listed is not None:
            found = tl.load(bits + query * words + word)
            chosen = (found[:, None] >> tl.arange(0, 32)[None, :]) & 1
            there = there & (tl.reshape(chosen, [BLOCK_K]) != 0)
        head = (i % BLOCKS) * BLOCK_H
        gradient = _add_to_keys(
            q, dout, k_tile, lse, delta, gradient, query, head, there, scale, MASKED, HEADS, DIM, BLOCK_H
        )
    dkeys += piece.to(tl.int64) * number_of_keys * DIM
    _store_rows(dkeys, gradient, column, number_of_keys, DIM, BLOCK_DIM, BLOCK_K)


@jit
def _add_to_keys(
    q,
    dout,
    k_tile,
    lse,
    delta,
    gradient,
    query,
    head,
    there,
    scale,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add the gradients from some heads of a query. Scores are transposed, [keys, heads]."""
    BLOCK_DIM: tl.constexpr = k_tile.shape[1]
    heads = head + tl.arange(0, BLOCK_H)
    q_tile = load_rows(q + query * HEADS * DIM, head, DIM, HEADS, MASKED, DIM, BLOCK_DIM, BLOCK_H)
    dout_tile = load_rows(dout + query * HEADS * DIM, head, DIM, HEADS, MASKED, DIM, BLOCK_DIM, BLOCK_H)
    row_lse = tl.load(lse + query * HEADS + heads, heads < HEADS, float("inf"))
    row_delta = tl.load(delta + query * HEADS + heads, heads < HEADS, 0.0)
    products = tl.dot(k_tile, q_tile.T, input_precision="ieee")
    weights = tl.exp2(products * (scale * 1.4426950408889634) - row_lse[None, :])
    weights = tl.where(there[:, None], weights, 0.0)
    dweights = tl.dot(k_tile, dout_tile.T, input_precision="ieee")
    dscores = weights * (dweights - row_delta[None, :]) * scale
    gradient = tl.dot(weights.to(q_tile.dtype), dout_tile, gradient, input_precision="ieee")
    return tl.dot(dscores.to(q_tile.dtype), q_tile, gradient, input_precision="ieee")


@jit
def _query_and_head(HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    return (tl.program_id(0) // BLOCKS).to(tl.int64), (tl.program_id(0) % BLOCKS) * BLOCK_H


@jit
def _keys_seen(query, start, seen, chosen, window, most):
    """The first token that a query sees, their number, and the same of compressed, or chosen, keys."""
    near = tl.maximum(tl.load(start + query), query - window + 1)
    far = tl.load(seen + 2 * query)
    count = (tl.load(seen + 2 * query + 1) - far).to(tl.int32)
    if chosen is not None:
        count = tl.minimum(count, most)
    return near, (query + 1 - near).to(tl.int32), far, count


@jit
def _load_keys(
    keys,
    compressed,
    chosen,
    query,
    near,
    of_window,
    far,
    of_compressed,
    most,
    i,
    before,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tile i of the keys that a query sees, [BLOCK_K, BLOCK_DIM], and which of its keys exist. The first
    `before` tiles have tokens, and the others compressed keys.
    """
    is_near = i < before
    place = tl.where(is_near, i, i - before) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = place < tl.where(is_near, of_window, of_compressed)
    own = tl.where(is_near, near, far) + place
    if chosen is not None:
        listed = tl.load(chosen + query * most + place, there & (i >= before), 0)
        own = tl.where(is_near, own, listed.to(tl.int64))
    column = tl.arange(0, BLOCK_DIM)
    rows = tl.where(is_near, keys, compressed) + own * DIM
    tile = tl.load(rows[:, None] + column[None, :], there[:, None] & (column[None, :] < DIM), 0.0)
    return tile, there


@jit
def _store_rows(start, values, row, rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr):
    i, column = row + tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    places = start + i.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(places, values.to(start.dtype.element_ty), (i[:, None] < rows) & (column[None, :] < DIM))
