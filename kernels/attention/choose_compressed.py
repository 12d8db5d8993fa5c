"""The compressed keys that an indexer chooses for each query (DeepSeek-V4, 2026).

    s_qw = sum_h weights_qh relu(scale q_qh . k_w),      over the compressed keys w that q sees

The `top_k` keys with the highest scores are chosen, or all of them if there are no more; of equal scores the
earlier key goes first. Scores are made for a slice of queries at a time, in float32, by the kernels of
`chosen_keys.py`, and the choice has no gradient.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, use_triton, without_autocast
from liger_models.kernels.attention.chosen_blocks import ChosenBlocks
from liger_models.kernels.attention.chosen_keys import choose_in_slice, highest, index_scores, pack_bits
from liger_models.kernels.attention.compressed_keys import CompressedKeys, blocks_of_queries

_MASK = 1 << 23  # blocks of a part of the queries, of 8 bytes each while they are packed


def choose_compressed(
    q: Tensor, keys: Tensor, weights: Tensor, places: CompressedKeys, top_k: int, *, scale: float
) -> Tensor:
    """Choose at most `top_k` of the compressed keys that each query sees.

    Args:
        q: [T, heads, D]; keys: [W, D]; weights: [T, heads].
        places: of the keys, and the documents.
        top_k: number of keys, at least 1.
        scale: of the products.

    Returns:
        [T, n] int32, n the least of `top_k` and the keys of the longest document: numbers of the chosen keys
        among the W, rising, then W.
    """
    with torch.no_grad(), without_autocast(q):
        if not use_triton(q, keys, weights, places.seen) or q.dtype != keys.dtype:
            return choose_compressed_plain(q, keys, weights, places, top_k, scale)
        chosen = torch.empty(len(q), min(top_k, places.most), dtype=torch.int32, device=q.device)
        firsts, ends = places.seen.int().T.contiguous()
        q, keys, weights = q.contiguous(), keys.contiguous(), weights.float().contiguous()
        for block in blocks_of_queries(places, 1, 1, len(q)):
            rows, (base, end) = slice(block.first, block.last), block.compressed
            choose_in_slice(
                *(q[rows], keys, weights[rows], top_k, scale, places.most, firsts),
                *(block.first, chosen[rows], base, end - base, ends),
            )
        return chosen


def choose_compressed_plain(
    q: Tensor, keys: Tensor, weights: Tensor, places: CompressedKeys, top_k: int, scale: float
) -> Tensor:
    """Plain twin of `choose_compressed`."""
    chosen = torch.full((len(q), min(top_k, places.most)), len(keys), dtype=torch.int32, device=q.device)
    for block in blocks_of_queries(places, 4, 1, len(q)):
        rows, columns = slice(block.first, block.last), slice(*block.compressed)
        column = torch.arange(*block.compressed, device=q.device)
        first, end = places.seen[rows].split(1, dim=1)
        seen = (column >= first) & (column < end)
        if not len(column):
            continue
        scores = index_scores(q[rows], keys[columns], weights[rows], scale)
        best = highest(scores.masked_fill(~seen, float("-inf")), top_k) & seen
        # The chosen keys come first, in their order.
        nth = best.int().argsort(dim=1, descending=True, stable=True)[:, : chosen.shape[1]]
        numbers = (nth + block.compressed[0]).masked_fill(~best.gather(1, nth), len(keys))
        chosen[rows, : nth.shape[1]] = numbers.int()
    return chosen


def as_blocks(chosen: Tensor, places: CompressedKeys) -> ChosenBlocks:
    """The keys that compressed ones stand for, as blocks: of those chosen, and of the tokens after the last
    one that a query sees.

    Args:
        chosen: [T, n] int32 from `choose_compressed`.
        places: of the compressed keys.
    """
    longest = max((b - a for a, b in itertools.pairwise(places.bounds)), default=0)
    count = ceil_div(longest, places.rate)
    words = ceil_div(count, 32)
    bits = torch.empty(len(chosen), 1, words, dtype=torch.int32, device=chosen.device)
    rows = max(1, _MASK // (count + 1))
    for start in range(0, len(chosen), rows):
        part = slice(start, start + rows)
        first, end = places.seen[part].split(1, dim=1)
        number = torch.where(chosen[part] < len(places.first), chosen[part] - first, count)
        mask = torch.zeros(len(number), count + 1, dtype=torch.bool, device=chosen.device)
        mask.scatter_(1, torch.cat([number, end - first], 1), True)
        bits[part, 0] = pack_bits(mask[:, :count], words)
    return ChosenBlocks(bits, places.rate)
