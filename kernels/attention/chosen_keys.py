"""The keys that an indexer chooses for each query, as `attention` takes them: one bit per query and key.

    s_qk = sum_h weights_qh relu(scale * q_qh . k_k),      over the keys k of q's document up to q

The `top_k` keys with the highest scores are chosen, or all of them if there are no more; of equal scores the
earlier key goes first, so the choice does not depend on the batch. The lightning indexer of DeepSeek-V3.2
(2025, arXiv:2512.02556, section 2.1), whose keys have one head.

Scores are made for a slice of queries at a time, in float32, so they never exist at once. The choice has no
gradient. Two kernels per slice: one computes scores, 2 T heads D operations per query, and skips tiles whose
queries attend to at most `top_k` keys; one finds the k-th highest score of each query, bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl, use_triton

_SLICE = 1 << 25  # scores of a slice of queries: 128 MiB
_IN_REGISTERS = 1 << 14  # scores of a query that one program holds


def choose_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    scale: float,
    longest: int,
    bounds: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """Choose at most `top_k` keys for each query.

    Args:
        q: [t, heads, D], the queries of tokens `first_query` to `first_query + t` of T; float16, bfloat16 or
            float32.
        k: [T, D] in q's dtype, one key per token.
        weights: [t, heads] float32, the weight of each head's score.
        top_k: the number of keys, at least 1.
        scale: of the products.
        longest: the length of the longest document, or more.
        bounds: [2, T] int32 from `document_bounds`; None: one document.
        first_query: the place of the first query among the keys.

    Returns:
        [t, words] int32: bit i % 32 of word i // 32 - first // 32 is set if key i of the T is chosen, where
        `first` is the first of the query's document. Bits of other documents and of keys after the query have
        no meaning.

    Raises:
        ValueError: shapes that do not fit, or `top_k` below 1.
    """
    (queries, heads, dim), tokens = q.shape, len(k)
    if k.shape != (tokens, dim) or weights.shape != (queries, heads) or first_query + queries > tokens:
        raise ValueError(
            f"found q {tuple(q.shape)} from {first_query} on, k {tuple(k.shape)} and weights "
            f"{tuple(weights.shape)}; expected [t, heads, D], [T, D] and [t, heads], with t of the T tokens"
        )
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; expected 1 or more")
    with torch.no_grad():
        if not use_triton(q, k, weights, bounds):
            return choose_keys_plain(q, k, weights, top_k, scale, longest, bounds, first_query)
        chosen = torch.empty(queries, _words(longest), dtype=torch.int32, device=q.device)
        q, k, weights = q.contiguous(), k.contiguous(), weights.float().contiguous()
        rows = max(1, min(queries, _SLICE // (longest + 1) or 1))
        for start in range(0, queries, rows):
            part = slice(start, start + rows)
            # No query sees a key before this one, and the slice's last query is the last key of all.
            query = first_query + start
            base = max(0, query - longest + 1)
            width = min(query + rows, first_query + queries) - base
            choose_in_slice(
                q[part], k, weights[part], top_k, scale, longest, bounds, query, chosen[part], base, width
            )
        return chosen


def choose_keys_plain(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    scale: float,
    longest: int,
    bounds: Tensor | None,
    first_query: int,
) -> Tensor:
    """Plain twin of `choose_keys`; materialises the scores of all queries."""
    scores = index_scores(q, k, weights, scale)
    token = torch.arange(len(k), device=q.device)
    query = token[first_query : first_query + len(q), None]
    first = token.new_zeros(len(q), 1) if bounds is None else bounds[0, query]
    seen = (token >= first) & (token <= query)
    best = highest(scores.masked_fill(~seen, float("-inf")), top_k) & seen
    # Move each query's keys to the start of its words.
    key = first // 32 * 32 + torch.arange(_words(longest) * 32, device=q.device)
    return pack_bits(best.gather(1, key.clamp(max=len(k) - 1)) & (key < len(k)), _words(longest))


def index_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Scores in at least float32, [..., t, T]: one head at a time, so no more than two of them exist at once.

    q: [..., t, heads, D]; k: [..., T, D]; weights: [..., t, heads].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, total = k.to(wide).mT, None
    for head in range(q.shape[-2]):
        score = torch.relu(q[..., head, :].to(wide) @ keys * scale) * weights[..., head, None].to(wide)
        total = score if total is None else total + score
    assert total is not None
    return total


def highest(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` highest scores of each row [..., n]; the earlier of equal ones go first."""
    count = min(count, scores.shape[-1])
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def chosen_mask(chosen: Tensor, bounds: Tensor | None, tokens: int) -> Tensor:
    """The bits as a mask [T, T] of keys (columns) per query (row); false outside a query's document. `bounds`
    as in `choose_keys`, and a bit per query.
    """
    token = torch.arange(tokens, device=chosen.device)
    first = token.new_zeros(tokens, 1) if bounds is None else bounds[0, :, None]
    word = token // 32 - first // 32
    found = chosen.gather(1, word.clamp(0, chosen.shape[1] - 1))
    return ((found >> (token % 32)) & 1).bool() & (token >= first) & (word < chosen.shape[1])


def _words(longest: int) -> int:
    """Words of the longest document, wherever it begins in its first word."""
    return ceil_div(longest + 31, 32)


def pack_bits(mask: Tensor, words: int) -> Tensor:
    """[..., n] bool -> [..., words] int32, whose missing bits are 0."""
    mask = torch.nn.functional.pad(mask, (0, 32 * words - mask.shape[-1]))
    bits = mask.unflatten(-1, (words, 32)).long() << torch.arange(32, device=mask.device)
    return bits.sum(-1).to(torch.int32)


def choose_in_slice(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    scale: float,
    longest: int,
    bounds: Tensor | None,
    first_query: int,
    chosen: Tensor,
    base: int,
    width: int,
    ends: Tensor | None = None,
) -> None:
    """Write the bits of the keys that a slice of queries chooses, of which none sees others than `base` to
    `base + width`. With `ends` [T], where each query's keys end, `bounds` has only their first ones, and
    lists are written in place of bits (`choose_compressed`).
    """
    queries, heads, dim = q.shape
    scores = torch.empty(queries, width, dtype=torch.float32, device=q.device)
    block_q, block_k = (32, 32) if q.dtype == torch.float32 else (128, 128)
    with on_device_of(q):
        index_scores_kernel[ceil_div(queries, block_q), ceil_div(width, block_k)](
            q,
            k,
            weights,
            bounds,
            ends,
            scores,
            first_query,
            base,
            queries,
            width,
            top_k,
            scale,
            HEADS=heads,
            DIM=dim,
            BLOCK_DIM=max(16, next_power_of_2(dim)),
            BLOCK_Q=block_q,
            BLOCK_K=block_k,
            num_warps=8,
            num_stages=2,
        )
        most = 32 * chosen.shape[1] if ends is None else longest
        block = max(32, min(_IN_REGISTERS, next_power_of_2(most)))
        highest_scores_kernel[(queries,)](
            scores,
            bounds,
            ends,
            chosen,
            len(k),
            first_query,
            base,
            width,
            chosen.shape[1],
            top_k,
            BLOCK=block,
            WHOLE=block >= most,
            num_warps=max(1, min(16, block // 1024)),
        )


@jit
def index_scores_kernel(
    q,
    k,
    weights,
    bounds,
    ends,
    scores,
    first_query,
    base,
    queries,
    width,
    top_k,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """scores [queries, width], of keys base to base + width; only where a query needs them."""
    row = tl.program_id(0) * BLOCK_Q
    column = tl.program_id(1) * BLOCK_K
    last_row = tl.minimum(row + BLOCK_Q, queries) - 1
    first_key, last_first = 0, 0  # of the first and of the last query: they never fall
    end = first_query + last_row + 1
    if ends is not None:
        end = tl.load(ends + first_query + last_row)
    if bounds is not None:
        first_key = tl.load(bounds + first_query + row)
        last_first = tl.load(bounds + first_query + last_row)
    seen = (base + column < end) & (base + column + BLOCK_K > first_key)
    # In one document the last query has the most keys.
    if first_key == last_first:
        seen = seen & (end - first_key > top_k)
    if seen:
        rows, columns = row + tl.arange(0, BLOCK_Q), column + tl.arange(0, BLOCK_K)
        inner = tl.arange(0, BLOCK_DIM)
        k_tile = tl.load(
            k + (base + columns).to(tl.int64)[:, None] * DIM + inner[None, :],
            (columns[:, None] < width) & (inner[None, :] < DIM),
            0.0,
        )
        q_rows = q + rows.to(tl.int64)[:, None] * HEADS * DIM + inner[None, :]
        q_mask = (rows[:, None] < queries) & (inner[None, :] < DIM)
        total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        for head in range(HEADS):
            q_tile = tl.load(q_rows + head * DIM, q_mask, 0.0)
            weight = tl.load(weights + rows * HEADS + head, rows < queries, 0.0)
            products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            total += tl.maximum(products * scale, 0.0) * weight[:, None]
        offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(scores + offsets, total, (rows[:, None] < queries) & (columns[None, :] < width))


@jit
def highest_scores_kernel(
    scores,
    bounds,
    ends,
    chosen,
    none,
    first_query,
    base,
    width,
    words,
    top_k,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Set the bits of the top_k highest scores of one query; with `ends`, list their keys, then `none`."""
    row = tl.program_id(0).to(tl.int64)
    query = first_query + tl.program_id(0)
    first = 0
    if bounds is not None:
        first = tl.load(bounds + query)
    if ends is None:
        lead = first % 32  # bits before the first key in its word
        count = query + 1 - first
    else:
        lead = 0
        count = tl.load(ends + query) - first
    scores += row * width + (first - lead - base)
    chosen += row * words
    place = tl.arange(0, BLOCK)
    word = tl.arange(0, BLOCK // 32)
    if count <= top_k:
        if ends is None:
            for start in range(0, words, BLOCK // 32):
                tl.store(chosen + start + word, tl.full([BLOCK // 32], -1, tl.int32), start + word < words)
        else:
            for start in range(0, words, BLOCK):
                nth = start + place
                tl.store(chosen + nth, tl.where(nth < count, first + nth, none), nth < words)
    else:
        end = lead + count
        keys = _ordered(scores, place, lead, end)
        # Bits of the k-th highest score, from the sign down: the highest number that top_k scores reach.
        least = tl.where(_reach(scores, keys, 0, lead, end, BLOCK, WHOLE) >= top_k, 0, -2147483648)
        for i in range(0, 31):
            candidate = least + (1 << (30 - i))
            enough = _reach(scores, keys, candidate, lead, end, BLOCK, WHOLE) >= top_k
            least = tl.where(enough, candidate, least)
        # No score is the highest number, so this one more is none.
        room = top_k - _reach(scores, keys, least + 1, lead, end, BLOCK, WHOLE)
        before, written = 0, 0
        for start in range(0, words * 32 if ends is None else count, BLOCK):
            if not WHOLE:
                keys = _ordered(scores, start + place, lead, end)
            there = (start + place >= lead) & (start + place < end)
            equal = ((keys == least) & there).to(tl.int32)
            rank = before + tl.cumsum(equal, 0)
            best = ((keys > least) & there) | ((equal != 0) & (rank <= room))
            if ends is None:
                bits = tl.sum(tl.reshape(best.to(tl.int32) << (place % 32), [BLOCK // 32, 32]), 1)
                tl.store(chosen + start // 32 + word, bits, start // 32 + word < words)
            else:
                nth = written + tl.cumsum(best.to(tl.int32), 0) - 1
                tl.store(chosen + nth, first + start + place, best)
                written += tl.sum(best.to(tl.int32), 0)
            before += tl.sum(equal, 0)


@jit
def _ordered(scores, place, lead, end):
    """Scores as integers of the same order; the lowest integer where there is none."""
    there = (place >= lead) & (place < end)
    values = tl.load(scores + place, there, 0.0) + 0.0  # 0.0 for -0.0
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@jit
def _reach(scores, keys, least, lead, end, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The number of scores of at least `least`, as ordered integers."""
    if WHOLE:
        return tl.sum((keys >= least).to(tl.int32), 0)
    else:
        total = 0
        for start in range(0, end, BLOCK):
            more = _ordered(scores, start + tl.arange(0, BLOCK), lead, end)
            total += tl.sum((more >= least).to(tl.int32), 0)
        return total
