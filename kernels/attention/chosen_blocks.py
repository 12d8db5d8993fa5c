"""Blocks of keys that an indexer chooses for each query and group of heads, as `attention` takes them: one
bit per query, group and block.

    s_qgb = max_k q_qg . k_k,      over the keys k of block b up to q

A block is `size` consecutive keys of a document, counted from its start. The `local` last blocks up to the
query's own are always chosen, and of the others those with the highest scores, `top_k` in all; of equal
scores the earlier block goes first. The indexer of MiniMax-M3 (2026), whose keys have one head.

A kernel computes the scores of a slice of queries at a time, in float32: 2 T D operations per query and
group, and T / size scores. The choice has no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl, use_triton
from liger_models.kernels.attention.chosen_keys import highest, pack_bits

_SLICE = 1 << 23  # scores of a slice of queries: 32 MiB


class ChosenBlocks(NamedTuple):
    """The blocks of keys that each query attends to.

    Attributes:
        bits: [t, groups, words] int32: bit b % 32 of word b // 32 is set if block b of the query's document
            is chosen for a group of heads. Bits of blocks after the query have no meaning.
        size: keys per block.
    """

    bits: Tensor
    size: int


def choose_blocks(
    q: Tensor,
    k: Tensor,
    top_k: int,
    *,
    size: int,
    local: int,
    longest: int,
    bounds: Tensor | None = None,
    first_query: int = 0,
) -> ChosenBlocks:
    """Choose at most `top_k` blocks of keys for each query and group.

    Args:
        q: [t, groups, D], the queries of tokens `first_query` to `first_query + t` of T; float16, bfloat16 or
            float32.
        k: [T, D] in q's dtype, one key per token.
        top_k: the number of blocks, at least 1 and at least `local`.
        size: keys per block.
        local: the number of last blocks that are always chosen, the query's own among them; 0: none.
        longest: the length of the longest document, or more.
        bounds: [2, T] int32 from `document_bounds`; None: one document.
        first_query: the place of the first query among the keys.

    Raises:
        ValueError: shapes that do not fit, or numbers out of range.
    """
    (queries, groups, dim), tokens = q.shape, len(k)
    if k.shape != (tokens, dim) or first_query + queries > tokens:
        raise ValueError(
            f"found q {tuple(q.shape)} from {first_query} on and k {tuple(k.shape)}; expected [t, groups, D] "
            "and [T, D], with t of the T tokens"
        )
    if size < 1 or local < 0 or top_k < max(1, local):
        raise ValueError(
            f"found {top_k} blocks of {size} keys, {local} of them local; expected 1 or more of each, and no "
            "more local blocks than blocks"
        )
    with torch.no_grad():
        if not use_triton(q, k, bounds):
            return choose_blocks_plain(q, k, top_k, size, local, longest, bounds, first_query)
        count = ceil_div(longest, size)
        words = ceil_div(count, 32)
        bits = torch.empty(queries, groups, words, dtype=torch.int32, device=q.device)
        q, k = q.contiguous(), k.contiguous()
        rows = max(1, _SLICE // (groups * count or 1))
        for start in range(0, queries, rows):
            part = slice(start, start + rows)
            scores = _block_scores(q[part], k, size, count, bounds, first_query + start)
            token = torch.arange(len(scores), device=q.device) + (first_query + start)
            place = token if bounds is None else token - bounds[0, token]
            bits[part] = pack_bits(_best(scores, place // size, top_k, local), words)
        return ChosenBlocks(bits, size)


def choose_blocks_plain(
    q: Tensor,
    k: Tensor,
    top_k: int,
    size: int,
    local: int,
    longest: int,
    bounds: Tensor | None,
    first_query: int,
) -> ChosenBlocks:
    """Plain twin of `choose_blocks`; materialises the scores of all queries and keys."""
    token = torch.arange(len(k), device=q.device)
    query = token[first_query : first_query + len(q), None]
    first = token.new_zeros(len(q), 1) if bounds is None else bounds[0, query]
    best, _ = best_blocks(q, k, (token >= first) & (token <= query), size, top_k, local)
    words = ceil_div(ceil_div(longest, size), 32)
    return ChosenBlocks(pack_bits(best[..., : words * 32], words), size)


def best_blocks(
    q: Tensor, k: Tensor, seen: Tensor, size: int, top_k: int, local: int
) -> tuple[Tensor, Tensor]:
    """The chosen blocks [..., t, groups, blocks] as a mask, and the block of each key for each query,
    [..., t, T].

    q: [..., t, groups, D]; k: [..., T, D]; seen: [..., t, T], the keys of each query's document up to it.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide).transpose(-3, -2) @ k.to(wide).mT[..., None, :, :]).transpose(-3, -2)
    place = seen.cumsum(-1) - 1
    block = place.clamp(min=0) // size
    scores = scores.masked_fill(~seen[..., None, :], float("-inf"))
    pooled = scores.new_full((*scores.shape[:-1], ceil_div(scores.shape[-1], size)), float("-inf"))
    pooled.scatter_reduce_(-1, block[..., None, :].expand(scores.shape), scores, "amax")
    return _best(pooled, place[..., -1] // size, top_k, local), block


def blocks_mask(chosen: ChosenBlocks, bounds: Tensor | None, tokens: int) -> Tensor:
    """The bits as a mask [groups, T, T] of keys (columns) per query (row); false outside a query's document.
    `bounds` as in `choose_blocks`, and bits for every query.
    """
    token = torch.arange(tokens, device=chosen.bits.device)
    first = token.new_zeros(tokens, 1) if bounds is None else bounds[0, :, None]
    block = (token - first).clamp(min=0) // chosen.size
    word = (block // 32).clamp(max=chosen.bits.shape[-1] - 1)
    found = chosen.bits.transpose(0, 1).gather(2, word.expand(chosen.bits.shape[1], -1, -1))
    there = (token >= first) & (block < 32 * chosen.bits.shape[-1])
    return ((found >> (block % 32)) & 1).bool() & there


def _best(scores: Tensor, own: Tensor, top_k: int, local: int) -> Tensor:
    """Mask of the chosen blocks: scores [..., groups, blocks], own [...], the block of each query."""
    block = torch.arange(scores.shape[-1], device=scores.device)
    near = (block <= own[..., None]) & (block > own[..., None] - local)
    return highest(scores.masked_fill(near[..., None, :], float("inf")), top_k)


def _block_scores(
    q: Tensor, k: Tensor, size: int, count: int, bounds: Tensor | None, first_query: int
) -> Tensor:
    """[t, groups, count] float32, -inf for blocks after the query."""
    queries, groups, dim = q.shape
    scores = torch.empty(queries, groups, count, dtype=torch.float32, device=q.device)
    block_q = 32 if q.dtype == torch.float32 else 64
    some = min(count, 8)
    with on_device_of(q):
        block_scores_kernel[ceil_div(queries, block_q), ceil_div(count, some), groups](
            q,
            k,
            bounds,
            scores,
            first_query,
            queries,
            count,
            GROUPS=groups,
            DIM=dim,
            BLOCK_DIM=max(16, next_power_of_2(dim)),
            SIZE=size,
            SOME=some,
            BLOCK_Q=block_q,
            BLOCK_K=min(block_q, max(16, next_power_of_2(size))),
            num_warps=4,
            num_stages=2,
        )
    return scores


@jit
def block_scores_kernel(
    q,
    k,
    bounds,
    scores,
    first_query,
    queries,
    count,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scores of SOME blocks for a tile of queries and one group, document by document."""
    row = tl.program_id(0) * BLOCK_Q
    group = tl.program_id(2)
    rows = row + tl.arange(0, BLOCK_Q)
    inner = tl.arange(0, BLOCK_DIM)
    exists = rows < queries
    token = first_query + tl.minimum(rows, queries - 1)
    firsts = token * 0
    if bounds is not None:
        firsts = tl.load(bounds + token)
    q_rows = q + (rows.to(tl.int64) * GROUPS + group)[:, None] * DIM + inner[None, :]
    q_tile = tl.load(q_rows, exists[:, None] & (inner[None, :] < DIM), 0.0)
    scores += (rows.to(tl.int64) * GROUPS + group) * count
    last_first = tl.max(firsts, 0)
    last = tl.max(token, 0)
    for block in range(tl.program_id(1) * SOME, tl.minimum((tl.program_id(1) + 1) * SOME, count)):
        best = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        first = tl.min(firsts, 0)
        while first <= last_first:  # the documents of these queries
            own = firsts == first
            start = first + block * SIZE
            for column in range(start, tl.minimum(start + SIZE, last + 1), BLOCK_K):
                keys = column + tl.arange(0, BLOCK_K)
                k_tile = tl.load(
                    k + keys.to(tl.int64)[:, None] * DIM + inner[None, :],
                    (keys[:, None] <= last) & (inner[None, :] < DIM),
                    0.0,
                )
                products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                seen = (keys[None, :] <= token[:, None]) & (keys[None, :] < start + SIZE) & own[:, None]
                best = tl.maximum(best, tl.max(tl.where(seen, products, -float("inf")), 1))
            first = tl.min(tl.where(firsts > first, firsts, last + 1), 0)
        tl.store(scores + block, best, exists)
