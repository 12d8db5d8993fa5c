"""Triton kernels of the backward pass of `flash_attention.py`: one for queries, one for keys and values.
`_tiles.py` describes the tiling of scores.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.attention._tiles import (
    capped_scores,
    chosen_of_group,
    distance_scores,
    end_key,
    end_query,
    first_key,
    first_query,
    is_chosen,
    key_tiles,
    load_rows,
    load_tile,
    nth_tile,
    parts_to_visit,
    query_block,
    query_tiles,
    store_rows,
    tiles_of_chosen,
    visible,
    visible_by_marks,
)


@jit
def attention_query_gradient_kernel(
    q,
    k,
    v,
    bounds,
    marked,
    slopes,
    chosen,
    visits,
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
    words,
    groups,
    k_rows,
    v_rows,
    RANGES: tl.constexpr,
    GROUP: tl.constexpr,
    CHOSEN_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute dq, and delta for the other kernel."""
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    REST_DIM: tl.constexpr = HEAD_DIM - BLOCK_DIM
    head, row = query_block(tokens, heads, BLOCK_Q)
    queries = row + tl.arange(0, BLOCK_Q)
    exists = queries < tokens
    dout += head * dout_head_stride
    dout_tile = load_rows(dout, row, dout_stride, tokens, True, VALUE_DIM, BLOCK_VALUE, BLOCK_Q)
    out_tile = load_rows(
        out + head * VALUE_DIM, row, heads * VALUE_DIM, tokens, True, VALUE_DIM, BLOCK_VALUE, BLOCK_Q
    )
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    tl.store(delta + head * tokens + queries, row_delta, exists)

    q += head * q_head_stride
    kv_head = head // GROUP
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    chosen_stride = 0
    if chosen is not None:
        chosen, chosen_stride = chosen_of_group(chosen, head, words, heads, groups)
    q_tile = load_rows(q, row, q_stride, tokens, True, HEAD_DIM, BLOCK_DIM, BLOCK_Q)
    if BLOCK_REST:
        q_rest = load_rows(q + BLOCK_DIM, row, q_stride, tokens, True, REST_DIM, BLOCK_REST, BLOCK_Q)
    row_lse = tl.load(lse + head * tokens + queries, exists, 0.0)

    gradient = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    if BLOCK_REST:
        gradient_rest = tl.zeros([BLOCK_Q, BLOCK_REST], tl.float32)
    for part in range(0, parts):
        firsts = first_key(queries, bounds, part, tokens, window, RANGES)
        ends = end_key(queries, bounds, part, tokens, RANGES)
        tile, before, whole, partial = key_tiles(
            row, firsts, ends, bounds, marked, tokens, window, RANGES, BLOCK_Q, BLOCK_K
        )
        if chosen is not None:
            visits, partial = tiles_of_chosen(
                visits, head, row // BLOCK_Q, heads, groups, tokens, BLOCK_Q, BLOCK_K
            )
        for WHOLE in tl.static_range(2 if chosen is None else 1):
            for i in range(0, whole if WHOLE else partial):
                if chosen is None:
                    column = (tile + nth_tile(i, before, whole, WHOLE)) * BLOCK_K
                else:
                    column = tl.load(visits + i) * BLOCK_K
                k_tile = load_tile(
                    k_rows, kv_head, k, column, k_stride, tokens, not WHOLE, HEAD_DIM, BLOCK_DIM, BLOCK_K
                )
                v_tile = load_tile(
                    v_rows, kv_head, v, column, v_stride, tokens, not WHOLE, VALUE_DIM, BLOCK_VALUE, BLOCK_K
                )
                products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                if BLOCK_REST:
                    k_rest = load_rows(
                        k + BLOCK_DIM, column, k_stride, tokens, not WHOLE, REST_DIM, BLOCK_REST, BLOCK_K
                    )
                    products = tl.dot(q_rest, k_rest.T, products, input_precision="ieee")
                scores, slope = capped_scores(products, scale, softcap, FLOAT32)
                if slopes is not None:
                    keys = column + tl.arange(0, BLOCK_K)
                    scores += distance_scores(head, slopes, keys[None, :], queries[:, None])
                weights = tl.exp2(scores - row_lse[:, None])
                if not WHOLE or chosen is not None:
                    keys = column + tl.arange(0, BLOCK_K)
                    seen = visible(keys[None, :], firsts[:, None], ends[:, None], bounds, window)
                    if marked is not None:
                        seen = seen & visible_by_marks(
                            marked, keys[None, :], keys[None, :], queries[:, None], tokens
                        )
                    if chosen is not None:
                        rows = tl.minimum(queries, tokens - 1)
                        seen = seen & is_chosen(
                            chosen, words, chosen_stride, rows, firsts, column, CHOSEN_SIZE, BLOCK_K, False
                        )
                    weights = tl.where(seen, weights, 0.0)
                dweights = tl.dot(dout_tile, v_tile.T, input_precision="ieee")
                dscores = ((weights * slope) * (dweights - row_delta[:, None])).to(k_tile.dtype)
                gradient = tl.dot(dscores, k_tile, gradient, input_precision="ieee")
                if BLOCK_REST:
                    gradient_rest = tl.dot(dscores, k_rest, gradient_rest, input_precision="ieee")
    dq += head * HEAD_DIM
    stride = heads * HEAD_DIM
    store_rows(dq, gradient * scale, row, stride, tokens, HEAD_DIM, BLOCK_DIM, BLOCK_Q)
    if BLOCK_REST:
        dq += BLOCK_DIM
        store_rows(dq, gradient_rest * scale, row, stride, tokens, REST_DIM, BLOCK_REST, BLOCK_Q)


@jit
def attention_key_value_gradient_kernel(
    q,
    k,
    v,
    bounds,
    marked,
    slopes,
    chosen,
    visits,
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
    words,
    groups,
    q_rows,
    dout_rows,
    RANGES: tl.constexpr,
    GROUP: tl.constexpr,
    CHOSEN_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute dk and dv of a block of keys, over all query heads that share its head, in a fixed order."""
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    REST_DIM: tl.constexpr = HEAD_DIM - BLOCK_DIM
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    # The first keys are visible to the most queries.
    column = tl.program_id(0) // kv_heads * BLOCK_K
    keys = column + tl.arange(0, BLOCK_K)
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    k_tile = load_rows(k, column, k_stride, tokens, True, HEAD_DIM, BLOCK_DIM, BLOCK_K)
    v_tile = load_rows(v, column, v_stride, tokens, True, VALUE_DIM, BLOCK_VALUE, BLOCK_K)
    if BLOCK_REST:
        k_rest = load_rows(k + BLOCK_DIM, column, k_stride, tokens, True, REST_DIM, BLOCK_REST, BLOCK_K)

    dk_tile = tl.zeros([BLOCK_K, BLOCK_DIM], tl.float32)
    if BLOCK_REST:
        dk_rest = tl.zeros([BLOCK_K, BLOCK_REST], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, BLOCK_VALUE], tl.float32)
    if RANGES:
        parts = parts_to_visit(keys, bounds, parts, tokens)
    for part in range(0, parts):
        firsts = first_query(keys, bounds, part, tokens, RANGES)
        ends = end_query(keys, bounds, part, tokens, window, RANGES)
        tile, before, whole, partial = query_tiles(
            column, firsts, ends, bounds, marked, tokens, window, RANGES, BLOCK_Q, BLOCK_K
        )
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            q_head = q + head * q_head_stride
            dout_head = dout + head * dout_head_stride
            listed = visits
            if chosen is not None:
                listed, partial = tiles_of_chosen(
                    visits, head, column // BLOCK_K, kv_heads * GROUP, groups, tokens, BLOCK_K, BLOCK_Q
                )
            for WHOLE in tl.static_range(2 if chosen is None else 1):
                for i in range(0, whole if WHOLE else partial):
                    if chosen is None:
                        row = (tile + nth_tile(i, before, whole, WHOLE)) * BLOCK_Q
                    else:
                        row = tl.load(listed + i) * BLOCK_Q
                    queries = row + tl.arange(0, BLOCK_Q)
                    q_tile = load_tile(
                        q_rows, head, q_head, row, q_stride, tokens, not WHOLE, HEAD_DIM, BLOCK_DIM, BLOCK_Q
                    )
                    dout_tile = load_tile(
                        dout_rows,
                        head,
                        dout_head,
                        row,
                        dout_stride,
                        tokens,
                        not WHOLE,
                        VALUE_DIM,
                        BLOCK_VALUE,
                        BLOCK_Q,
                    )
                    exists = queries < tokens
                    row_lse = tl.load(lse + head * tokens + queries, exists, 0.0)
                    row_delta = tl.load(delta + head * tokens + queries, exists, 0.0)
                    # Everything is transposed, [keys, queries], so that both products below can use it
                    # directly.
                    products = tl.dot(k_tile, q_tile.T, input_precision="ieee")
                    if BLOCK_REST:
                        q_rest = load_rows(
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
                    scores, slope = capped_scores(products, scale, softcap, FLOAT32)
                    if slopes is not None:
                        scores += distance_scores(head, slopes, keys[:, None], queries[None, :])
                    weights = tl.exp2(scores - row_lse[None, :])
                    if not WHOLE or chosen is not None:
                        seen = (queries[None, :] >= firsts[:, None]) & (queries[None, :] < ends[:, None])
                        if marked is not None:
                            seen = seen & visible_by_marks(
                                marked, queries[None, :], keys[:, None], queries[None, :], tokens
                            )
                        if chosen is not None:
                            rows = tl.minimum(queries, tokens - 1)
                            first_keys = first_key(rows, bounds, 0, tokens, window, RANGES)
                            of_group, chosen_stride = chosen_of_group(
                                chosen, head, words, kv_heads * GROUP, groups
                            )
                            seen = seen & is_chosen(
                                of_group,
                                words,
                                chosen_stride,
                                rows,
                                first_keys,
                                column,
                                CHOSEN_SIZE,
                                BLOCK_K,
                                True,
                            )
                        weights = tl.where(seen, weights, 0.0)
                    dv_tile = tl.dot(weights.to(q_tile.dtype), dout_tile, dv_tile, input_precision="ieee")
                    dweights = tl.dot(v_tile, dout_tile.T, input_precision="ieee")
                    dscores = ((weights * slope) * (dweights - row_delta[None, :])).to(q_tile.dtype)
                    dk_tile = tl.dot(dscores, q_tile, dk_tile, input_precision="ieee")
                    if BLOCK_REST:
                        dk_rest = tl.dot(dscores, q_rest, dk_rest, input_precision="ieee")
    dk += kv_head * HEAD_DIM
    stride = kv_heads * HEAD_DIM
    store_rows(dk, dk_tile * scale, column, stride, tokens, HEAD_DIM, BLOCK_DIM, BLOCK_K)
    if BLOCK_REST:
        dk += BLOCK_DIM
        store_rows(dk, dk_rest * scale, column, stride, tokens, REST_DIM, BLOCK_REST, BLOCK_K)
    dv += kv_head * VALUE_DIM
    store_rows(dv, dv_tile, column, kv_heads * VALUE_DIM, tokens, VALUE_DIM, BLOCK_VALUE, BLOCK_K)
