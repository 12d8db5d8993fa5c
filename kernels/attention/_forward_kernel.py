"""Triton kernel of the forward pass of `flash_attention.py`. `_tiles.py` describes the tiling of scores."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.attention._tiles import (
    capped_scores,
    chosen_of_group,
    distance_scores,
    end_key,
    first_key,
    is_chosen,
    key_tiles,
    load_rows,
    load_tile,
    nth_tile,
    query_block,
    store_rows,
    tiles_of_chosen,
    visible,
    visible_by_marks,
)


@jit
def attention_forward_kernel(
    q,
    k,
    v,
    bounds,
    marked,
    chosen,
    visits,
    sinks,
    slopes,
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
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    REST_DIM: tl.constexpr = HEAD_DIM - BLOCK_DIM
    head, row = query_block(tokens, heads, BLOCK_Q)
    queries = row + tl.arange(0, BLOCK_Q)
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

    accumulator = tl.zeros([BLOCK_Q, BLOCK_VALUE], tl.float32)
    if sinks is not None:  # one more key, whose value is zero
        largest = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = tl.zeros([BLOCK_Q], tl.float32) + 1.0
    else:
        largest = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_Q], tl.float32)
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
                scores, _ = capped_scores(products, scale, softcap, FLOAT32)
                if slopes is not None:
                    keys = column + tl.arange(0, BLOCK_K)
                    scores += distance_scores(head, slopes, keys[None, :], queries[:, None])
                if WHOLE and chosen is None:
                    larger = tl.maximum(largest, tl.max(scores, 1))
                    shift = larger
                else:
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
                    scores = tl.where(seen, scores, -float("inf"))
                    larger = tl.maximum(largest, tl.max(scores, 1))
                    # For a query with no visible key so far, subtract zero: exp2(-inf - -inf) would be nan.
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
    store_rows(out, result, row, heads * VALUE_DIM, tokens, VALUE_DIM, BLOCK_VALUE, BLOCK_Q)
