"""Attention to a window of keys and to compressed ones, where keys are the values, and sinks (DeepSeek-V4,
2026). Every head has queries of its own, and all share one head of keys.

    p_qj = exp(scale q_q . k_j) / (exp(sink) + sum of the others),      o_q = sum_j p_qj k_j
    over the last `window` tokens k_j of q's document up to q, and over its compressed keys that q sees

A document of n tokens has n // rate compressed keys. Key w belongs to its tokens w * rate to (w + 1) * rate,
and is seen from the last of these on. `chosen` leaves some of them out (`choose_compressed`).

With the gradient g of the output, D_q = g_q . o_q, and dz_qj = p_qj (g_q . k_j - D_q):

    dq_q = scale sum_j dz_qj k_j,   dk_j = sum_q (scale dz_qj q_q + p_qj g_q),   dsink = -sum_q p_q,sink D_q

There is no kernel of Triton's yet: blocks of queries run one after the other as products of torch's, so no
more than a block's scores exist, forward and backward, and the backward pass keeps only the operands, the
output and the log-sum-exp. Scores, sums and gradients of keys are in float32. A document costs
2 T heads D (window + T / rate) operations, twice in the forward pass and five times in the backward pass.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    at_least_float32,
    autocasts,
    ceil_div,
    once_differentiable,
    without_autocast,
)
from liger_models.kernels.attention.chosen_keys import highest, index_scores, pack_bits

_SCORES = 1 << 25  # elements of a block: 128 MiB in float32
_MOST_QUERIES = 256  # of a block


class CompressedKeys(NamedTuple):
    """Places of the compressed keys of some documents, made by `compressed_keys`.

    Attributes:
        bounds: the boundaries of the documents, on the host.
        rate: tokens of a compressed key; 0: there are none.
        first: [W] int64, the first token of each key.
        number: [W] int64, its number within its document.
        start: [T, 1] int64, the first token of each token's document.
        seen: [T, 2] int64, the range of compressed keys that each token sees.
    """

    bounds: list[int]
    rate: int
    first: Tensor
    number: Tensor
    start: Tensor
    seen: Tensor

    @property
    def most(self) -> int:
        """Number of the keys of the longest document."""
        return max((b - a for a, b in itertools.pairwise(self.bounds)), default=0) // max(1, self.rate)


def compressed_keys(bounds: Sequence[int], rate: int, device: torch.device) -> CompressedKeys:
    """Find the places of the compressed keys of documents with these boundaries, `rate` tokens each; with the
    rate 0 there are none.
    """
    bounds = list(bounds)
    table = torch.tensor(bounds, device="cpu").to(device, non_blocking=True)
    lengths, total = table.diff(), bounds[-1]
    start = torch.repeat_interleave(table[:-1], lengths, output_size=total)
    if not rate:
        none = table.new_zeros(0)
        return CompressedKeys(bounds, 0, none, none, start[:, None], table.new_zeros(total, 2))
    counts = lengths // rate
    number_of_keys = sum((b - a) // rate for a, b in itertools.pairwise(bounds))
    before = counts.cumsum(0) - counts
    document = torch.repeat_interleave(
        torch.arange(len(counts), device=device), counts, output_size=number_of_keys
    )
    number = torch.arange(number_of_keys, device=device) - before[document]
    own = torch.repeat_interleave(before, lengths, output_size=total)
    ends = own + (torch.arange(total, device=device) - start + 1) // rate
    first = table[document] + number * rate
    return CompressedKeys(bounds, rate, first, number, start[:, None], torch.stack([own, ends], 1))


def compressed_attention(
    q: Tensor,
    keys: Tensor,
    compressed: Tensor | None,
    sinks: Tensor,
    places: CompressedKeys,
    *,
    scale: float,
    window: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend to a window of keys and to compressed ones, which are the values, too.

    Args:
        q: [T, heads, D], any floating dtype.
        keys: [T, D] in q's dtype.
        compressed: [W, D] in q's dtype; None: there are none.
        sinks: [heads], a logit of each head without a value.
        places: of the compressed keys, and the documents.
        scale: of the products.
        window: number of tokens that a query sees, its own included.
        chosen: [T, words] int32 from `choose_compressed`; None: all that a query sees.

    Returns:
        [T, heads, D] in q's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    (tokens, heads, dim), found = q.shape, len(places.first)
    compressed = keys.new_empty(0, dim) if compressed is None else compressed
    fits = keys.shape == (tokens, dim) and compressed.shape == (found, dim) and sinks.shape == (heads,)
    if not fits or places.bounds[-1] != tokens or window < 1:
        raise ValueError(
            f"found q {tuple(q.shape)}, keys {tuple(keys.shape)}, compressed {tuple(compressed.shape)}, "
            f"sinks {tuple(sinks.shape)} and a window of {window}; expected [T, heads, D], [T, D], "
            f"[{found}, D] and [heads] for T = {places.bounds[-1]} and a window of 1 or more"
        )
    if autocasts(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, keys, compressed = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, keys, compressed))
    with without_autocast(q):
        out: Tensor = _Attention.apply(q, keys, compressed, sinks, chosen, places, scale, window)
    return out


def choose_compressed(
    q: Tensor, keys: Tensor, weights: Tensor, places: CompressedKeys, top_k: int, *, scale: float
) -> Tensor:
    """Choose at most `top_k` of the compressed keys that each query sees, with the highest scores

        s_qw = sum_h weights_qh relu(scale q_qh . k_w);      of equal ones the earlier key.

    Args:
        q: [T, heads, D]; keys: [W, D]; weights: [T, heads].
        places: of the keys, and the documents.
        top_k: number of keys, at least 1.
        scale: of the products.

    Returns:
        [T, words] int32: bit i % 32 of word i // 32 is set if key i of the query's document is chosen. Bits
        of keys that it does not see have no meaning.
    """
    words = max(1, ceil_div(places.most, 32))
    chosen = torch.zeros(len(q), words, dtype=torch.int32, device=q.device)
    with torch.no_grad(), without_autocast(q):
        for block in _blocks(places, 4, 1, len(q)):
            rows, columns = slice(block.first, block.last), slice(*block.compressed)
            column = torch.arange(*block.compressed, device=q.device)
            first, end = places.seen[rows].split(1, dim=1)
            seen = (column >= first) & (column < end)
            if not len(column):
                continue
            scores = index_scores(q[rows], keys[columns], weights[rows], scale)
            best = highest(scores.masked_fill(~seen, float("-inf")), top_k) & seen
            # Move each query's keys to the start of its words.
            place = first - block.compressed[0] + torch.arange(32 * words, device=q.device)
            own = best.gather(1, place.clamp(0, len(column) - 1)) & (place < len(column))
            chosen[rows] = pack_bits(own, words)
    return chosen


class _Block(NamedTuple):
    """Queries `first` to `last`, which see no token before `key`, and of compressed keys only this range."""

    first: int
    last: int
    key: int
    compressed: tuple[int, int]


def _blocks(places: CompressedKeys, heads: int, window: int, most: int = _MOST_QUERIES) -> Iterator[_Block]:
    """Blocks of at most `most` queries, in order."""
    bounds, total = places.bounds, places.bounds[-1]
    width = window + _MOST_QUERIES + places.most
    rows = max(1, min(most, _SCORES // (heads * width)))
    before, known = 0, 0  # compressed keys of the documents before number `known`
    for first in range(0, total, rows):
        last = min(first + rows, total)
        beginning, end = (bisect_right(bounds, token) - 1 for token in (first, last - 1))
        key, span = max(bounds[beginning], first - window + 1), (0, 0)
        if places.rate:
            for document in range(known, beginning):
                before += (bounds[document + 1] - bounds[document]) // places.rate
            known = beginning
            inside = sum((bounds[i + 1] - bounds[i]) // places.rate for i in range(beginning, end))
            span = before, before + inside + (last - bounds[end]) // places.rate
        yield _Block(first, last, key, span)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        compressed: Tensor,
        sinks: Tensor,
        chosen: Tensor | None,
        places: CompressedKeys,
        scale: float,
        window: int,
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=at_least_float32(q[:0]).dtype, device=q.device)
        sink = sinks.to(lse.dtype)
        for block in _blocks(places, q.shape[1], window):
            rows = slice(block.first, block.last)
            k = _keys_of(block, keys, compressed)
            scores = _scores(q[rows], k, block, places, scale, window, chosen)  # [queries, heads, keys]
            largest = torch.maximum(scores.amax(-1), sink)
            weights = scores.sub_(largest[..., None]).exp_()
            total = weights.sum(-1) + (sink - largest).exp()
            value = _product(weights.flatten(0, 1).to(q.dtype), k).view_as(q[rows])
            out[rows] = (value / total[..., None]).to(q.dtype)
            lse[rows] = largest + total.log()
        ctx.save_for_backward(q, keys, compressed, sinks, chosen, out, lse)
        ctx.options = places, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, keys, compressed, sinks, chosen, out, lse = ctx.saved_tensors
        places, scale, window = ctx.options
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dkeys, dcompressed = (torch.zeros_like(x, dtype=lse.dtype) for x in (keys, compressed))
        dsinks, sink = torch.zeros_like(sinks, dtype=lse.dtype), sinks.to(lse.dtype)
        for block in _blocks(places, q.shape[1], window):
            rows = slice(block.first, block.last)
            k = _keys_of(block, keys, compressed)
            own_q, own_grad = q[rows].flatten(0, 1), grad[rows].to(q.dtype).reshape(-1, q.shape[-1])
            mean = (out[rows].to(lse.dtype) * grad[rows].to(lse.dtype)).sum(-1)  # [queries, heads]
            weights = _scores(q[rows], k, block, places, scale, window, chosen)
            weights = weights.sub_(lse[rows][..., None]).exp_()
            dscores = _product(own_grad, k.T).view_as(weights).sub_(mean[..., None]).mul_(weights).mul_(scale)
            small = dscores.flatten(0, 1).to(q.dtype)
            dq[rows] = _product(small, k).view_as(q[rows]).to(q.dtype)
            dk = _product(small.T, own_q) + _product(weights.flatten(0, 1).to(q.dtype).T, own_grad)
            dkeys[block.key : block.last] += dk[: block.last - block.key]
            dcompressed[slice(*block.compressed)] += dk[block.last - block.key :]
            dsinks -= ((sink - lse[rows]).exp() * mean).sum(0)
        found = dkeys.to(keys.dtype), dcompressed.to(compressed.dtype), dsinks.to(sinks.dtype)
        return dq, *found, None, None, None, None


def _keys_of(block: _Block, keys: Tensor, compressed: Tensor) -> Tensor:
    """The keys of a block, [n, D]: tokens, then compressed ones."""
    return torch.cat([keys[block.key : block.last], compressed[slice(*block.compressed)]])


def _scores(
    q: Tensor,
    k: Tensor,
    block: _Block,
    places: CompressedKeys,
    scale: float,
    window: int,
    chosen: Tensor | None,
) -> Tensor:
    """Scaled products of the queries of a block [queries, heads, D] with its keys [n, D], in at least
    float32; -inf for keys that a query does not see.
    """
    rows = slice(block.first, block.last)
    scores = _product(q.flatten(0, 1), k.T).mul_(scale).view(*q.shape[:2], len(k))
    query = torch.arange(block.first, block.last, device=q.device)[:, None]
    token = torch.arange(block.key, block.last, device=q.device)
    seen = (token <= query) & (token > query - window) & (token >= places.start[rows])
    if block.compressed[1] > block.compressed[0]:
        column = torch.arange(*block.compressed, device=q.device)
        first, end = places.seen[rows].split(1, dim=1)
        among = (column >= first) & (column < end)
        if chosen is not None:
            place = (column - first).clamp(0, 32 * chosen.shape[1] - 1)
            among = among & ((chosen[rows].gather(1, place // 32) >> (place % 32)) & 1).bool()
        seen = torch.cat([seen, among], 1)
    return scores.masked_fill_(~seen[:, None], float("-inf"))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices of one dtype, in at least float32."""
    if a.is_cuda and a.itemsize == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    return at_least_float32(a) @ at_least_float32(b)
