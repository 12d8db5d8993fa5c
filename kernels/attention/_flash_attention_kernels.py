"""The Triton kernels of `attention.py`: forward, gradient of the queries, gradient of the keys and values.

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
def attention_forward_kernel(
    q,
    k,
    v,
    bounds,
    sinks,
    out,
    lse,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    tokens,
    heads,
    window,
    scale,
    softcap,
    parts,
    k_rows,
    v_rows,
    RANGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    REST_DIM: tl.constexpr = HEAD_DIM - BLOCK_DIM
    head, row = _query_block(tokens, heads, BLOCK_Q)
    queries = row + tl.arange(0, BLOCK_Q)
    q += head * q_head_stride
    k += head // GROUP * k_head_stride
    v += head // GROUP * v_head_stride
    kv_head = tl.cast(head // GROUP, tl.int32)
    q_tile = _load_rows(q, row, q_stride, tokens, True, HEAD_DIM, BLOCK_DIM, BLOCK_Q)
    if BLOCK_REST:
        q_rest = _load_rows(q + BLOCK_DIM, row, q_stride, tokens, True, REST_DIM, BLOCK_REST, BLOCK_Q)

    accumulator = tl.zeros([BLOCK_Q, BLOCK_VALUE], tl.float32)
    if sinks is not None:  # one more key, whose value is zero
        largest = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = tl.zeros([BLOCK_Q], tl.float32) + 1.0
    else:
        largest = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_Q], tl.float32)
    for part in range(0, parts):
        firsts = _first_key(queries, bounds, part, tokens, window, RANGES)
        ends = _end_key(queries, bounds, part, tokens, RANGES)
        tile, before, whole, partial = _key_tiles(
            row, firsts, ends, bounds, tokens, window, RANGES, BLOCK_Q, BLOCK_K
        )
        for WHOLE in tl.static_range(2):
            for i in range(0, whole if WHOLE else partial):
                column = (tile + _nth_tile(i, before, whole, WHOLE)) * BLOCK_K
                if k_rows is not None:
                    k_tile = k_rows.load([column, kv_head * HEAD_DIM])
                    v_tile = v_rows.load([column, kv_head * VALUE_DIM])
                else:
                    k_tile = _load_rows(k, column, k_stride, tokens, not WHOLE, HEAD_DIM, BLOCK_DIM, BLOCK_K)
                    v_tile = _load_rows(
                        v, column, v_stride, tokens, not WHOLE, VALUE_DIM, BLOCK_VALUE, BLOCK_K
                    )
                products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                if BLOCK_REST:
                    k_rest = _load_rows(
                        k + BLOCK_DIM, column, k_stride, tokens, not WHOLE, REST_DIM, BLOCK_REST, BLOCK_K
                    )
                    products = tl.dot(q_rest, k_rest.T, products, input_precision="ieee")
                scores, _ = _scores(products, scale, softcap, FLOAT32)
                if WHOLE:
                    larger = tl.maximum(largest, tl.max(scores, 1))
                    shift = larger
                else:
                    keys = column + tl.arange(0, BLOCK_K)
                    seen = _visible(keys[None, :], firsts[:, None], ends[:, None], bounds, window)
                    scores = tl.where(seen, scores, -float("inf"))
                    larger = tl.maximum(largest, tl.max(scores, 1))
                    # While a query has seen nothing, subtract zero: exp2(-inf - -inf) would be nan.
                    shift = tl.where(larger == -float("inf"), 0.0, larger)
                weights = tl.exp2(scores - shift[:, None])
                decay = tl.exp2(largest - shift)
                total = total * decay + tl.sum(weights, 1)
                accumulator = accumulator * decay[:, None]
                accumulator = tl.dot(weights.to(v_tile.dtype), v_tile, accumulator, input_precision="ieee")
                largest = larger
    tl.store(lse + head * tokens + queries, largest + tl.log2(total), queries < tokens)
    result = accumulator / total[:, None]
    out += head * VALUE_DIM
    _store_rows(out, result, row, heads * VALUE_DIM, tokens, VALUE_DIM, BLOCK_VALUE, BLOCK_Q)


@jit
def attention_query_gradient_kernel(
    q,
    k,
    v,
    bounds,
    out,
    dout,
    lse,
    delta,
    dq,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dout_stride,
    dout_head_stride,
    tokens,
    heads,
    window,
    scale,
    softcap,
    parts,
    k_rows,
    v_rows,
    RANGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dq, and on the way delta, which the other kernel needs too."""
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    REST_DIM: tl.constexpr = HEAD_DIM - BLOCK_DIM
    head, row = _query_block(tokens, heads, BLOCK_Q)
    queries = row + tl.arange(0, BLOCK_Q)
    exists = queries < tokens
    dout += head * dout_head_stride
    dout_tile = _load_rows(dout, row, dout_stride, tokens, True, VALUE_DIM, BLOCK_VALUE, BLOCK_Q)
    out_tile = _load_rows(
        out + head * VALUE_DIM, row, heads * VALUE_DIM, tokens, True, VALUE_DIM, BLOCK_VALUE, BLOCK_Q
    )
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + head * tokens + queries, row_delta, exists)

    q += head * q_head_stride
    k += head // GROUP * k_head_stride
    v += head // GROUP * v_head_stride
    kv_head = tl.cast(head // GROUP, tl.int32)
    q_tile = _load_rows(q, row, q_stride, tokens, True, HEAD_DIM, BLOCK_DIM, BLOCK_Q)
    if BLOCK_REST:
        q_rest = _load_rows(q + BLOCK_DIM, row, q_stride, tokens, True, REST_DIM, BLOCK_REST, BLOCK_Q)
    row_lse = tl.load(lse + head * tokens + queries, exists, 0.0)

    gradient = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    if BLOCK_REST:
        gradient_rest = tl.zeros([BLOCK_Q, BLOCK_REST], tl.float32)
    for part in range(0, parts):
        firsts = _first_key(queries, bounds, part, tokens, window, RANGES)
        ends = _end_key(queries, bounds, part, tokens, RANGES)
        tile, before, whole, partial = _key_tiles(
            row, firsts, ends, bounds, tokens, window, RANGES, BLOCK_Q, BLOCK_K
        )
        for WHOLE in tl.static_range(2):
            for i in range(0, whole if WHOLE else partial):
                column = (tile + _nth_tile(i, before, whole, WHOLE)) * BLOCK_K
                if k_rows is not None:
                    k_tile = k_rows.load([column, kv_head * HEAD_DIM])
                    v_tile = v_rows.load([column, kv_head * VALUE_DIM])
                else:
                    k_tile = _load_rows(k, column, k_stride, tokens, not WHOLE, HEAD_DIM, BLOCK_DIM, BLOCK_K)
                    v_tile = _load_rows(
                        v, column, v_stride, tokens, not WHOLE, VALUE_DIM, BLOCK_VALUE, BLOCK_K
                    )
                products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                if BLOCK_REST:
                    k_rest = _load_rows(
                        k + BLOCK_DIM, column, k_stride, tokens, not WHOLE, REST_DIM, BLOCK_REST, BLOCK_K
                    )
                    products = tl.dot(q_rest, k_rest.T, products, input_precision="ieee")
                scores, slope = _scores(products, scale, softcap, FLOAT32)
                weights = tl.exp2(scores - row_lse[:, None])
                if not WHOLE:
                    keys = column + tl.arange(0, BLOCK_K)
                    seen = _visible(keys[None, :], firsts[:, None], ends[:, None], bounds, window)
                    weights = tl.where(seen, weights, 0.0)
                dweights = tl.dot(dout_tile, v_tile.T, input_precision="ieee")
                dscores = ((weights * slope) * (dweights - row_delta[:, None])).to(k_tile.dtype)
                gradient = tl.dot(dscores, k_tile, gradient, input_precision="ieee")
                if BLOCK_REST:
                    gradient_rest = tl.dot(dscores, k_rest, gradient_rest, input_precision="ieee")
    dq += head * HEAD_DIM
    stride = heads * HEAD_DIM
    _store_rows(dq, gradient * scale, row, stride, tokens, HEAD_DIM, BLOCK_DIM, BLOCK_Q)
    if BLOCK_REST:
        dq += BLOCK_DIM
        _store_rows(dq, gradient_rest * scale, row, stride, tokens, REST_DIM, BLOCK_REST, BLOCK_Q)


@jit
def attention_key_value_gradient_kernel(
    q,
    k,
    v,
    bounds,
    dout,
    lse,
    delta,
    dk,
    dv,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dout_stride,
    dout_head_stride,
    tokens,
    kv_heads,
    window,
    scale,
    softcap,
    parts,
    q_rows,
    dout_rows,
    RANGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dk and dv of a block of keys, over all query heads that share its head, in a fixed order."""
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    REST_DIM: tl.constexpr = HEAD_DIM - BLOCK_DIM
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    # The first keys are seen by most queries.
    column = tl.program_id(0) // kv_heads * BLOCK_K
    keys = column + tl.arange(0, BLOCK_K)
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    k_tile = _load_rows(k, column, k_stride, tokens, True, HEAD_DIM, BLOCK_DIM, BLOCK_K)
    v_tile = _load_rows(v, column, v_stride, tokens, True, VALUE_DIM, BLOCK_VALUE, BLOCK_K)
    if BLOCK_REST:
        k_rest = _load_rows(k + BLOCK_DIM, column, k_stride, tokens, True, REST_DIM, BLOCK_REST, BLOCK_K)

    dk_tile = tl.zeros([BLOCK_K, BLOCK_DIM], tl.float32)
    if BLOCK_REST:
        dk_rest = tl.zeros([BLOCK_K, BLOCK_REST], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, BLOCK_VALUE], tl.float32)
    if parts > 1:
        parts = _parts_that_are_met(keys, bounds, parts, tokens)
    for part in range(0, parts):
        firsts = _first_query(keys, bounds, part, tokens, RANGES)
        ends = _end_query(keys, bounds, part, tokens, window, RANGES)
        tile, before, whole, partial = _query_tiles(
            column, firsts, ends, bounds, tokens, window, RANGES, BLOCK_Q, BLOCK_K
        )
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            q_head = q + head * q_head_stride
            dout_head = dout + head * dout_head_stride
            for WHOLE in tl.static_range(2):
                for i in range(0, whole if WHOLE else partial):
                    row = (tile + _nth_tile(i, before, whole, WHOLE)) * BLOCK_Q
                    queries = row + tl.arange(0, BLOCK_Q)
                    if q_rows is not None:
                        q_tile = q_rows.load([row, tl.cast(head, tl.int32) * HEAD_DIM])
                        dout_tile = dout_rows.load([row, tl.cast(head, tl.int32) * VALUE_DIM])
                    else:
                        q_tile = _load_rows(
                            q_head, row, q_stride, tokens, not WHOLE, HEAD_DIM, BLOCK_DIM, BLOCK_Q
                        )
                        dout_tile = _load_rows(
                            dout_head, row, dout_stride, tokens, not WHOLE, VALUE_DIM, BLOCK_VALUE, BLOCK_Q
                        )
                    exists = queries < tokens
                    row_lse = tl.load(lse + head * tokens + queries, exists, 0.0)
                    row_delta = tl.load(delta + head * tokens + queries, exists, 0.0)
                    # Everything transposed, [keys, queries], so that both products below take it as it is.
                    products = tl.dot(k_tile, q_tile.T, input_precision="ieee")
                    if BLOCK_REST:
                        q_rest = _load_rows(
                            q_head + BLOCK_DIM,
                            row,
                            q_stride,
                            tokens,
                            not WHOLE,
                            REST_DIM,
                            BLOCK_REST,
                            BLOCK_Q,
                        )
                        products = tl.dot(k_rest, q_rest.T, products, input_precision="ieee")
                    scores, slope = _scores(products, scale, softcap, FLOAT32)
                    weights = tl.exp2(scores - row_lse[None, :])
                    if not WHOLE:
                        seen = (queries[None, :] >= firsts[:, None]) & (queries[None, :] < ends[:, None])
                        weights = tl.where(seen, weights, 0.0)
                    dv_tile = tl.dot(weights.to(q_tile.dtype), dout_tile, dv_tile, input_precision="ieee")
                    dweights = tl.dot(v_tile, dout_tile.T, input_precision="ieee")
                    dscores = ((weights * slope) * (dweights - row_delta[None, :])).to(q_tile.dtype)
                    dk_tile = tl.dot(dscores, q_tile, dk_tile, input_precision="ieee")
                    if BLOCK_REST:
                        dk_rest = tl.dot(dscores, q_rest, dk_rest, input_precision="ieee")
    dk += kv_head * HEAD_DIM
    stride = kv_heads * HEAD_DIM
    _store_rows(dk, dk_tile * scale, column, stride, tokens, HEAD_DIM, BLOCK_DIM, BLOCK_K)
    if BLOCK_REST:
        dk += BLOCK_DIM
        _store_rows(dk, dk_rest * scale, column, stride, tokens, REST_DIM, BLOCK_REST, BLOCK_K)
    dv += kv_head * VALUE_DIM
    _store_rows(dv, dv_tile, column, kv_heads * VALUE_DIM, tokens, VALUE_DIM, BLOCK_VALUE, BLOCK_K)


@jit
def _query_block(tokens, heads, BLOCK_Q: tl.constexpr):
    """This program's head and first query: the last queries, which see most, first."""
    block = tl.cdiv(tokens, BLOCK_Q) - 1 - tl.program_id(0) // heads
    return (tl.program_id(0) % heads).to(tl.int64), block * BLOCK_Q


@jit
def _first_key(query, bounds, part, tokens, window, RANGES: tl.constexpr):
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
def _end_key(query, bounds, part, tokens, RANGES: tl.constexpr):
    """The first key behind those that each query sees."""
    if RANGES:
        return _given(bounds, 2 * part + 1, tokens, tl.minimum(query, tokens - 1))
    else:
        return query + 1


@jit
def _first_query(key, bounds, part, tokens, RANGES: tl.constexpr):
    """The first query that sees each key."""
    if RANGES:
        return _given(bounds, 2 * part, tokens, tl.minimum(key, tokens - 1))
    else:
        return key


@jit
def _end_query(key, bounds, part, tokens, window, RANGES: tl.constexpr):
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
def _parts_that_are_met(token, bounds, parts, tokens):
    """One, where a block's ranges are empty but for the first: then all behind the second are, too."""
    token = tl.minimum(token, tokens - 1)
    firsts, ends = _given(bounds, 2, tokens, token), _given(bounds, 3, tokens, token)
    return tl.where(tl.min(firsts, 0) < tl.max(ends, 0), parts, 1)


@jit
def _given(bounds, row, tokens, token):
    return tl.load(bounds + tl.cast(row, tl.int64) * tokens + token)


@jit
def _visible(keys, firsts, ends, bounds, window):
    seen = keys < ends
    if bounds is not None or window is not None:
        seen = seen & (keys >= firsts)
    return seen


@jit
def _key_tiles(
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
            _first_key(row, bounds, 0, tokens, window, RANGES),
            _first_key(last_row, bounds, 0, tokens, window, RANGES),
            _end_key(row, bounds, 0, tokens, RANGES),
            _end_key(last_row, bounds, 0, tokens, RANGES),
            BLOCK_K,
        )


@jit
def _query_tiles(
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
            _first_query(column, bounds, 0, tokens, RANGES),
            _first_query(last_key, bounds, 0, tokens, RANGES),
            _end_query(column, bounds, 0, tokens, window, RANGES),
            _end_query(last_key, bounds, 0, tokens, window, RANGES),
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
def _nth_tile(i, before, whole, WHOLE: tl.constexpr):
    """The i-th whole tile, or the i-th of the others, counted from the first tile."""
    if WHOLE:
        return before + i
    else:
        return i + tl.where(i < before, 0, whole)


@jit
def _scores(products, scale, softcap, FLOAT32: tl.constexpr):
    """Scaled and capped scores in units of ln(2), and the slope of the cap."""
    if softcap is None:
        scores = products * (scale * 1.4426950408889634)
        slope = 1.0
    elif FLOAT32:
        tanh = _tanh(products * (scale / softcap))
        scores = tanh * (softcap * 1.4426950408889634)
        slope = 1.0 - tanh * tanh
    else:
        # Weights are rounded to 16 bits: tanh(x) = 2 h - 1, h = 1 / (1 + exp(-2x)), is near enough and takes
        # half the time of the exact form. So does the root squared beside a division.
        root = tl.rsqrt(1.0 + tl.exp2(products * (scale / softcap * -2.8853900817779268)))
        h = root * root
        scores = h * (softcap * 2.8853900817779268) - softcap * 1.4426950408889634
        slope = 4.0 * h - 4.0 * h * h
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
def _load_rows(
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
def _store_rows(
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
