"""What the Triton kernels of `flash_attention.py` stand on: the tiles that a block meets, their scores, how
they are loaded and stored.

What a query sees is a range of keys, and what a key is seen by a range of queries. So the tiles that a block
meets are some at its beginning that are visible in part, then some that are visible as a whole, then some at
its end that are visible in part. Only the outer ones need a mask. They are taken first.

The ranges are those of causal attention, `first .. query` and `key .. last`, where `bounds` [2, T] says where
documents begin and end; or, RANGES, they are given, and there may be several that do not overlap: `bounds`
[2 * parts, T] holds first and end of each, of the keys of each query or of the queries of each key. A range
from T to 0 is empty, and does not widen those of its block.

Scores and `lse` are in units of ln(2), so that exp2 is the softmax's exponential.

Queries and keys have HEAD_DIM elements, values and results VALUE_DIM. A tile's sizes are powers of two, so a
head of 192 is taken in two parts, BLOCK_DIM = 128 and BLOCK_REST = 64; BLOCK_REST is 0 where one part does.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl


@jit
def query_block(tokens, heads, BLOCK_Q: tl.constexpr):
    """This program's head and first query: the last queries, which see most, first."""
    block = tl.cdiv(tokens, BLOCK_Q) - 1 - tl.program_id(0) // heads
    return (tl.program_id(0) % heads).to(tl.int64), block * BLOCK_Q


@jit
def first_key(query, bounds, part, tokens, window, RANGES: tl.constexpr):
    """The first key that each query sees; a query beyond the last is as the last."""
    query = tl.minimum(query, tokens - 1)
    if RANGES:
        return _given(bounds, 2 * part, tokens, query)
    else:
        first = query * 0
        if bounds is not None:
            first = tl.load(bounds + query)
        if window is not None:
            first = tl.maximum(first, query - window + 1)
        return first


@jit
def end_key(query, bounds, part, tokens, RANGES: tl.constexpr):
    """The first key behind those that each query sees."""
    if RANGES:
        return _given(bounds, 2 * part + 1, tokens, tl.minimum(query, tokens - 1))
    else:
        return query + 1


@jit
def first_query(key, bounds, part, tokens, RANGES: tl.constexpr):
    """The first query that sees each key."""
    if RANGES:
        return _given(bounds, 2 * part, tokens, tl.minimum(key, tokens - 1))
    else:
        return key


@jit
def end_query(key, bounds, part, tokens, window, RANGES: tl.constexpr):
    """The first query behind those that see each key; a key beyond the last is as the last."""
    key = tl.minimum(key, tokens - 1)
    if RANGES:
        return _given(bounds, 2 * part + 1, tokens, key)
    else:
        end = key * 0 + tokens
        if bounds is not None:
            end = tl.load(bounds + tokens + key)
        if window is not None:
            end = tl.minimum(end, key + window)
        return end


@jit
def parts_that_are_met(token, bounds, parts, tokens):
    """One, where a block's ranges are empty but for the first: then all behind the second are, too."""
    # No condition stands in front of this: ptxas 12.8 took the mask of a load for it, and of heads of 96 in
    # float32 left the lanes out of the reductions that load nothing.
    second = tl.minimum(parts - 1, 1)
    token = tl.minimum(token, tokens - 1)
    firsts, ends = _given(bounds, 2 * second, tokens, token), _given(bounds, 2 * second + 1, tokens, token)
    return tl.where(tl.min(firsts, 0) < tl.max(ends, 0), parts, 1)


@jit
def _given(bounds, row, tokens, token):
    return tl.load(bounds + tl.cast(row, tl.int64) * tokens + token)


@jit
def visible(keys, firsts, ends, bounds, window):
    seen = keys < ends
    if bounds is not None or window is not None:
        seen = seen & (keys >= firsts)
    return seen


@jit
def key_tiles(
    row,
    firsts,
    ends,
    bounds,
    tokens,
    window,
    RANGES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tiles of keys that a block of queries meets, as `_tiles` gives them."""
    if RANGES:
        return _tiles_of_ranges(firsts, ends, BLOCK_K)
    else:  # neither end ever falls from one query to the next
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
    tokens,
    window,
    RANGES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tiles of queries that a block of keys meets, as `_tiles` gives them."""
    if RANGES:
        return _tiles_of_ranges(firsts, ends, BLOCK_Q)
    else:
        last_key = tl.minimum(column + BLOCK_K, tokens) - 1
        return _tiles(
            first_query(column, bounds, 0, tokens, RANGES),
            first_query(last_key, bounds, 0, tokens, RANGES),
            end_query(column, bounds, 0, tokens, window, RANGES),
            end_query(last_key, bounds, 0, tokens, window, RANGES),
            BLOCK_Q,
        )


@jit
def _tiles_of_ranges(firsts, ends, BLOCK: tl.constexpr):
    end = tl.max(ends, 0)
    first = tl.minimum(tl.min(firsts, 0), end)  # where all are empty, they end before they begin
    return _tiles(first, tl.max(firsts, 0), tl.min(ends, 0), end, BLOCK)


@jit
def _tiles(first, whole_first, whole_end, end, BLOCK: tl.constexpr):
    """The tiles of first .. end, of which those inside of whole_first .. whole_end are visible as a whole.

    Returns the first tile, how many partly visible ones precede the whole ones, how many whole ones there
    are, and how many partly visible ones.
    """
    tile = first // BLOCK
    count = tl.cdiv(end, BLOCK) - tile
    before = tl.minimum(tl.cdiv(whole_first, BLOCK) - tile, count)
    whole = tl.maximum(whole_end // BLOCK - tile - before, 0)
    return tile, before, whole, count - whole


@jit
def nth_tile(i, before, whole, WHOLE: tl.constexpr):
    """The i-th whole tile, or the i-th of the others, counted from the first tile."""
    if WHOLE:
        return before + i
    else:
        return i + tl.where(i < before, 0, whole)


@jit
def capped_scores(products, scale, softcap, FLOAT32: tl.constexpr):
    """Scaled and capped scores in units of ln(2), and the slope of the cap."""
    if softcap is None:
        scores = products * (scale * 1.4426950408889634)
        slope = 1.0
    else:
        if FLOAT32:
            tanh = _tanh(products * (scale / softcap))
        else:
            # Weights are rounded to 16 bits: tanh(x) = 2 / (1 + exp(-2x)) - 1 is near enough and takes half
            # the time of the exact form. So does the root squared beside a division.
            root = tl.rsqrt(0.5 + 0.5 * tl.exp2(products * (scale / softcap * -2.8853900817779268)))
            tanh = root * root - 1.0
        scores = tanh * (softcap * 1.4426950408889634)
        slope = 1.0 - tanh * tanh
    return scores, slope


@jit
def _tanh(x):
    """tanh to a few roundings: from exp(-2|x|), and near zero, where that cancels, by its series."""
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
    """[BLOCK, BLOCK_DIM] of a head that begins at `start`, by the copy engine where `rows` describes it."""
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
    """[BLOCK, BLOCK_DIM] of a head from `row` on, zero beyond the tokens and beyond HEAD_DIM."""
    # A 64-bit start and 32-bit offsets from it, which cost half the registers.
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
