"""Building blocks of the kernels of `flash_attention.py`: the tiles a block visits, their scores, loads and
stores.

Each query attends to a range of keys, and each key is visible to a range of queries. A block therefore
visits partly visible tiles at both ends of its range and fully visible ones between. Only the partly visible
tiles need a mask, and they are visited first.

In causal attention the ranges are `first .. query` and `key .. last`, where `bounds` [2, T] holds the start
and end of each token's document. With RANGES they are explicit, and several disjoint ones are allowed:
`bounds` [2 * parts, T] holds the start and end of each part, of keys per query or of queries per key. The
range from T to 0 is empty and does not widen the block's range. With `marked` [T] a key after the query is
visible only if both are marked, so that tiles with such pairs are partly visible.

Scores and `lse` are in units of ln(2), so that the softmax can use exp2.

Queries and keys have HEAD_DIM elements, values and results VALUE_DIM. Tile sizes are powers of two, so a head
of 192 is processed in two parts, BLOCK_DIM = 128 and BLOCK_REST = 64; BLOCK_REST is 0 if one part suffices.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl


@jit
def query_block(tokens, heads, BLOCK_Q: tl.constexpr):
    """This program's head and first query. The last queries, which have the most keys, come first."""
    block = tl.cdiv(tokens, BLOCK_Q) - 1 - tl.program_id(0) // heads
    return (tl.program_id(0) % heads).to(tl.int64), block * BLOCK_Q


@jit
def first_key(query, bounds, part, tokens, window, RANGES: tl.constexpr):
    """First key visible to each query; out-of-range queries are treated as the last."""
    query = tl.minimum(query, tokens - 1)
    if RANGES:
        return _load_bound(bounds, 2 * part, tokens, query)
    else:
        first = query * 0
        if bounds is not None:
            first = tl.load(bounds + query)
        if window is not None:
            first = tl.maximum(first, query - window + 1)
        return first


@jit
def end_key(query, bounds, part, tokens, RANGES: tl.constexpr):
    """End (exclusive) of the keys visible to each query."""
    if RANGES:
        return _load_bound(bounds, 2 * part + 1, tokens, tl.minimum(query, tokens - 1))
    else:
        return query + 1


@jit
def first_query(key, bounds, part, tokens, RANGES: tl.constexpr):
    """First query that attends to each key."""
    if RANGES:
        return _load_bound(bounds, 2 * part, tokens, tl.minimum(key, tokens - 1))
    else:
        return key


@jit
def end_query(key, bounds, part, tokens, window, RANGES: tl.constexpr):
    """End (exclusive) of the queries that attend to each key; out-of-range keys are treated as the last."""
    key = tl.minimum(key, tokens - 1)
    if RANGES:
        return _load_bound(bounds, 2 * part + 1, tokens, key)
    else:
        end = key * 0 + tokens
        if bounds is not None:
            end = tl.load(bounds + tokens + key)
        if window is not None:
            end = tl.minimum(end, key + window)
        return end


@jit
def parts_to_visit(token, bounds, parts, tokens):
    """Number of parts to visit: one if the block's second range is empty, since all later ones then are."""
    # No condition surrounds this: ptxas 12.8 mistook it for the mask of a load, and with heads of 96 in
    # float32 left the lanes that load nothing out of the reductions.
    second = tl.minimum(parts - 1, 1)
    token = tl.minimum(token, tokens - 1)
    firsts, ends = (
        _load_bound(bounds, 2 * second, tokens, token),
        _load_bound(bounds, 2 * second + 1, tokens, token),
    )
    return tl.where(tl.min(firsts, 0) < tl.max(ends, 0), parts, 1)


@jit
def _load_bound(bounds, row, tokens, token):
    return tl.load(bounds + tl.cast(row, tl.int64) * tokens + token)


@jit
def visible(keys, firsts, ends, bounds, window):
    seen = keys < ends
    if bounds is not None or window is not None:
        seen = seen & (keys >= firsts)
    return seen


@jit
def visible_by_marks(marked, others, keys, queries, tokens):
    """Whether keys up to the query, or marked tokens after it, are visible. `others` are the tokens of the
    visited tile, keys or queries, which are marked or not; the ranges account for the block's own.
    """
    return (keys <= queries) | (tl.load(marked + others, others < tokens, 0) > 0)


@jit
def chosen_of_group(chosen, head, words, heads, groups):
    """The bits of a head's group, and the words from a query's to the next one's."""
    return chosen + (head // (heads // groups)) * words, groups * words


@jit
def is_chosen(
    chosen,
    words,
    stride,
    queries,
    firsts,
    column,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Whether the queries attend to the keys of a tile that begins at `column`, a multiple of 32: [queries,
    keys], or transposed. By the bits of `chosen_keys.py` if SIZE is 0, else by those of `chosen_blocks.py`,
    of blocks of so many keys. `firsts` are the first keys of the queries' documents.

    Words are loaded, and not a word for every bit, which would be prefetched into shared memory.
    """
    rows = chosen + queries.to(tl.int64) * stride
    first_word = column // 32 - firsts // 32
    nth, bit = tl.arange(0, BLOCK_K // 32), tl.arange(0, 32)
    if SIZE:
        return _in_chosen_block(rows, words, firsts, column, SIZE, BLOCK_K, TRANSPOSED)
    elif TRANSPOSED:
        word = first_word[None, :] + nth[:, None]
        found = tl.load(rows[None, :] + word, (word >= 0) & (word < words), 0)
        bits = (found[:, None, :] >> bit[None, :, None]) & 1
        return tl.reshape(bits, [BLOCK_K, queries.shape[0]]) != 0
    else:
        word = first_word[:, None] + nth[None, :]
        found = tl.load(rows[:, None] + word, (word >= 0) & (word < words), 0)
        bits = (found[:, :, None] >> bit[None, None, :]) & 1
        return tl.reshape(bits, [queries.shape[0], BLOCK_K]) != 0


@jit
def _in_chosen_block(
    rows, words, firsts, column, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Whether the keys of a tile are in chosen blocks; the tile overlaps few blocks."""
    keys = column + tl.arange(0, BLOCK_K)
    first_block = tl.maximum(column - firsts, 0) // SIZE
    if TRANSPOSED:
        seen = tl.full([BLOCK_K, firsts.shape[0]], 0, tl.int32)
    else:
        seen = tl.full([firsts.shape[0], BLOCK_K], 0, tl.int32)
    for n in tl.static_range((BLOCK_K + SIZE - 2) // SIZE + 1):
        block = first_block + n
        bit = (tl.load(rows + block // 32, block < 32 * words, 0) >> (block % 32)) & 1
        start = firsts + block * SIZE
        if TRANSPOSED:
            inside = (keys[:, None] >= start[None, :]) & (keys[:, None] < start[None, :] + SIZE)
            seen = tl.where(inside, bit[None, :], seen)
        else:
            inside = (keys[None, :] >= start[:, None]) & (keys[None, :] < start[:, None] + SIZE)
            seen = tl.where(inside, bit[:, None], seen)
    return seen != 0


@jit
def key_tiles(
    row,
    firsts,
    ends,
    bounds,
    marked,
    tokens,
    window,
    RANGES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles of keys that a block of queries visits, as `_tiles` returns them."""
    if RANGES:
        whole_end = tl.min(ends, 0)
        if marked is not None:
            whole_end = tl.minimum(whole_end, row + 1)
        return _tiles_of_ranges(firsts, ends, tl.max(firsts, 0), whole_end, BLOCK_K)
    else:  # both ends are non-decreasing over queries
        last_row = tl.minimum(row + BLOCK_Q, tokens) - 1
        return _tiles(
            first_key(row, bounds, 0, tokens, window, RANGES),
            first_key(last_row, bounds, 0, tokens, window, RANGES),
            end_key(row, bounds, 0, tokens, RANGES),
            end_key(last_row, bounds, 0, tokens, RANGES),
            BLOCK_K,
        )


@jit
def query_tiles(
    column,
    firsts,
    ends,
    bounds,
    marked,
    tokens,
    window,
    RANGES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles of queries that a block of keys visits, as `_tiles` returns them."""
    last_key = tl.minimum(column + BLOCK_K, tokens) - 1
    if RANGES:
        whole_first = tl.max(firsts, 0)
        if marked is not None:
            whole_first = tl.maximum(whole_first, last_key)
        return _tiles_of_ranges(firsts, ends, whole_first, tl.min(ends, 0), BLOCK_Q)
    else:
        return _tiles(
            first_query(column, bounds, 0, tokens, RANGES),
            first_query(last_key, bounds, 0, tokens, RANGES),
            end_query(column, bounds, 0, tokens, window, RANGES),
            end_query(last_key, bounds, 0, tokens, window, RANGES),
            BLOCK_Q,
        )


@jit
def _tiles_of_ranges(firsts, ends, whole_first, whole_end, BLOCK: tl.constexpr):
    end = tl.max(ends, 0)
    first = tl.minimum(tl.min(firsts, 0), end)  # if all are empty, end precedes first
    return _tiles(first, whole_first, whole_end, end, BLOCK)


@jit
def _tiles(first, whole_first, whole_end, end, BLOCK: tl.constexpr):
    """Tiles that cover first .. end; those inside whole_first .. whole_end are fully visible.

    Returns the first tile, the number of partly visible tiles before the fully visible ones, the number of
    fully visible tiles, and the number of partly visible ones.
    """
    tile = first // BLOCK
    count = tl.cdiv(end, BLOCK) - tile
    before = tl.minimum(tl.cdiv(whole_first, BLOCK) - tile, count)
    whole = tl.maximum(whole_end // BLOCK - tile - before, 0)
    return tile, before, whole, count - whole


@jit
def nth_tile(i, before, whole, WHOLE: tl.constexpr):
    """Index of the i-th fully visible (WHOLE) or partly visible tile, from the first tile."""
    if WHOLE:
        return before + i
    else:
        return i + tl.where(i < before, 0, whole)


@jit
def tiles_of_chosen(visits, head, tile, heads, groups, tokens, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """Where the list of the tiles that a head's tile visits begins, after their number, which is returned
    second: see `_visits.py`. BLOCK is the size of such a tile, and OTHER that of those visited.
    """
    group = head // (heads // groups)
    lists = group * tl.cdiv(tokens, BLOCK) + tile
    visits += lists.to(tl.int64) * (1 + tl.cdiv(tokens, OTHER))
    return visits + 1, tl.load(visits)


@jit
def capped_scores(products, scale, softcap, FLOAT32: tl.constexpr):
    """Scaled and capped scores in units of ln(2), and the derivative of the cap."""
    if softcap is None:
        scores = products * (scale * 1.4426950408889634)
        slope = 1.0
    else:
        if FLOAT32:
            tanh = _tanh(products * (scale / softcap))
        else:
            # Weights are rounded to 16 bits: tanh(x) = 2 / (1 + exp(-2x)) - 1 is accurate enough and takes
            # half the time of the exact form, and so does the squared root in place of a division.
            root = tl.rsqrt(0.5 + 0.5 * tl.exp2(products * (scale / softcap * -2.8853900817779268)))
            tanh = root * root - 1.0
        scores = tanh * (softcap * 1.4426950408889634)
        slope = 1.0 - tanh * tanh
    return scores, slope


@jit
def distance_scores(head, slopes, keys, queries):
    """Score that a head adds for the distance from each query back to each key, in units of ln(2)."""
    distances = (keys - queries).to(tl.float32)
    return distances * (tl.load(slopes + head) * 1.4426950408889634)


@jit
def _tanh(x):
    """tanh within a few roundings: from exp(-2|x|), and by its series near zero, where that cancels."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = (((62.0 / 2835 * s - 17.0 / 315) * s + 2.0 / 15) * s - 1.0 / 3) * s * x + x
    return tl.where(s < 0.0625, near, tl.where(x < 0, -far, far))


@jit
def load_tile(
    rows,
    head,
    start,
    row,
    stride,
    tokens,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[BLOCK, BLOCK_DIM] of a head starting at `start`, through TMA if `rows` is a descriptor."""
    if rows is not None:
        return rows.load([row, tl.cast(head, tl.int32) * DIM])
    else:
        return load_rows(start, row, stride, tokens, MASKED, DIM, BLOCK_DIM, BLOCK)


@jit
def load_rows(
    head,
    row,
    stride,
    tokens,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[BLOCK, BLOCK_DIM] of a head from `row` on, zero past the last token and past HEAD_DIM."""
    # A 64-bit base and 32-bit offsets use half the registers of 64-bit offsets.
    start = head + tl.cast(row, tl.int64) * stride
    i = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    tile = start + (i * stride + column)
    if MASKED:
        mask = i < tokens - row
        if HEAD_DIM < BLOCK_DIM:
            mask = mask & (column < HEAD_DIM)
        return tl.load(tile, mask, 0.0)
    elif HEAD_DIM < BLOCK_DIM:
        return tl.load(tile, column < HEAD_DIM, 0.0)
    else:
        return tl.load(tile)


@jit
def store_rows(
    head,
    values,
    row,
    stride,
    tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    tile = head + tl.cast(row, tl.int64) * stride + (i * stride + column)
    tl.store(tile, values.to(head.dtype.element_ty), (i < tokens - row) & (column < HEAD_DIM))
