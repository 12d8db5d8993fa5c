"""Attention to a window of keys and to compressed ones, where keys are the values, and sinks (DeepSeek-V4,
2026). Every head has queries of its own, and all share one head of keys.

    p_qj = exp(scale q_q . k_j) / (exp(sink) + sum of the others),      o_q = sum_j p_qj k_j
    over the last `window` tokens k_j of q's document up to q, and over its compressed keys that q sees

A document of n tokens has n // rate compressed keys. Key w belongs to its tokens w * rate to (w + 1) * rate,
and is seen from the last of these on. `chosen` leaves some of them out (`choose_compressed`).

With the gradient g of the output, D_q = g_q . o_q, and dz_qj = p_qj (g_q . k_j - D_q):

    dq_q = scale sum_j dz_qj k_j,   dk_j = sum_q (scale dz_qj q_q + p_qj g_q),   dsink = -sum_q p_q,sink D_q

Scores never leave the chip, and the backward pass keeps only the operands, the output and the log-sum-exp.
A query costs 2 heads D operations per key that it sees or has chosen, twice in the forward pass and thrice
for its own gradient. The gradients of keys cost four times as much, and are computed for tiles of keys, by
all queries that see, or have chosen, any of a tile. They are summed in float32 in a fixed order. Memory
grows with the number of tokens: chosen keys are lists, from which the bits of each tile are made for a part
of the keys at a time. The kernels are in `_compressed_kernels.py`; on a CPU blocks of queries run one after
the other as products of torch's.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.kernels._dispatch import (
    at_least_float32,
    autocasts,
    ceil_div,
    next_power_of_2,
    num_sms,
    on_device_of,
    once_differentiable,
    use_triton,
    without_autocast,
)
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.attention._compressed_kernels import (
    compressed_forward_kernel,
    compressed_key_gradient_kernel,
    compressed_query_gradient_kernel,
)
from liger_models.kernels.attention._tile_sizes import Configuration, Tiles, find_compressed_tiles

_SCORES = 1 << 25  # elements of a block: 128 MiB in float32
_MOST_QUERIES = 256  # of a block
_BITS = 1 << 26  # bytes of the chosen keys' bits that exist at once
_LOG2_E = 1.4426950408889634  # the kernels' lse is in units of ln(2)


class CompressedKeys(NamedTuple):
    """Places of the compressed keys of some documents, made by `compressed_keys`.

    Attributes:
        bounds: the boundaries of the documents, on the host.
        rate: tokens of a compressed key; 0: there are none.
        first: [W] int64, the first token of each key.
        number: [W] int64, its number within its document.
        end: [W] int64, the end of its document.
        start: [T, 1] int64, the first token of each token's document.
        seen: [T, 2] int64, the range of compressed keys that each token sees.
    """

    bounds: list[int]
    rate: int
    first: Tensor
    number: Tensor
    end: Tensor
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
    table = to_device(torch.tensor(bounds, device="cpu"), device)
    lengths, total = table.diff(), bounds[-1]
    start = torch.repeat_interleave(table[:-1], lengths, output_size=total)
    if not rate:
        none = table.new_zeros(0)
        return CompressedKeys(bounds, 0, none, none, none, start[:, None], table.new_zeros(total, 2))
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
    seen = torch.stack([own, ends], 1)
    return CompressedKeys(bounds, rate, first, number, table[document + 1], start[:, None], seen)


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
        chosen: [T, n] int32 from `choose_compressed`; None: all that a query sees.

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
    tiles = None
    if use_triton(q, keys, compressed, sinks, chosen, places.seen):
        if (tiles := find_compressed_tiles(q)) is None:
            _say_no_tiles(gpu_of(q).arch)
        tiles = tiles if q.dtype == keys.dtype == compressed.dtype else None
    if tiles is None:
        return compressed_attention_plain(
            q, keys, compressed, sinks, places, scale=scale, window=window, chosen=chosen
        )
    operands = (x.contiguous() for x in (q, keys, compressed, sinks))
    with without_autocast(q):
        out: Tensor = _KernelAttention.apply(*operands, chosen, places, scale, window, tiles)
    return out


@functools.cache
def _say_no_tiles(arch: str) -> None:
    """Warn once of plain attention."""
    warnings.warn(
        f"the kernels of attention to compressed keys have no tiles for heads this large on {arch}: plain "
        "PyTorch runs, on some queries at a time, and takes longer",
        stacklevel=3,
    )


def compressed_attention_plain(
    q: Tensor,
    keys: Tensor,
    compressed: Tensor,
    sinks: Tensor,
    places: CompressedKeys,
    *,
    scale: float,
    window: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Plain twin of `compressed_attention`."""
    with without_autocast(q):
        out: Tensor = _Attention.apply(q, keys, compressed, sinks, chosen, places, scale, window)
    return out


class _Block(NamedTuple):
    """Queries `first` to `last`, which see no token before `key`, and of compressed keys only this range."""

    first: int
    last: int
    key: int
    compressed: tuple[int, int]


def blocks_of_queries(
    places: CompressedKeys, heads: int, window: int, most: int = _MOST_QUERIES
) -> Iterator[_Block]:
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
        for block in blocks_of_queries(places, q.shape[1], window):
            rows = slice(block.first, block.last)
            k = keys_of(block, keys, compressed)
            seen = seen_keys(block, places, window, chosen, q.device)
            scores = scaled_products(q[rows], k, scale, seen)  # [queries, heads, keys]
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
        for block in blocks_of_queries(places, q.shape[1], window):
            rows = slice(block.first, block.last)
            k = keys_of(block, keys, compressed)
            own_q, own_grad = q[rows].flatten(0, 1), grad[rows].to(q.dtype).reshape(-1, q.shape[-1])
            mean = (out[rows].to(lse.dtype) * grad[rows].to(lse.dtype)).sum(-1)  # [queries, heads]
            seen = seen_keys(block, places, window, chosen, q.device)
            weights = scaled_products(q[rows], k, scale, seen)
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


class _KernelAttention(torch.autograd.Function):
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
        tiles: Configuration,
    ) -> Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if len(q):
            with on_device_of(q):
                compressed_forward_kernel[_programs(q, tiles.forward)](
                    q,
                    keys,
                    compressed,
                    sinks,
                    places.start,
                    places.seen,
                    chosen,
                    out,
                    lse,
                    window,
                    scale,
                    _width(chosen),
                    **_constants(q, tiles.forward),
                )
        ctx.save_for_backward(q, keys, compressed, sinks, chosen, out, lse)
        ctx.options = places, scale, window, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, keys, compressed, sinks, chosen, out, lse = ctx.saved_tensors
        places, scale, window, tiles = ctx.options
        dout, dq, delta = dout.contiguous(), torch.empty_like(q), torch.empty_like(lse)
        if not len(q):
            return dq, *map(torch.zeros_like, (keys, compressed, sinks)), *[None] * 5
        with on_device_of(q):
            compressed_query_gradient_kernel[_programs(q, tiles.query_gradient)](
                q,
                keys,
                compressed,
                places.start,
                places.seen,
                chosen,
                out,
                dout,
                lse,
                delta,
                dq,
                window,
                scale,
                _width(chosen),
                **_constants(q, tiles.query_gradient),
            )
            operands = q, dout, lse, delta, places, scale, tiles.key_value_gradient
            dkeys = _key_gradients(*operands, keys, window, None)
            dcompressed = _key_gradients(*operands, compressed, None, chosen)
        shares = torch.exp2(sinks.float() * _LOG2_E - lse)
        return dq, dkeys, dcompressed, -(shares * delta).sum(0).to(sinks.dtype), *[None] * 5


def _key_gradients(
    q: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    places: CompressedKeys,
    scale: float,
    tiles: Tiles,
    keys: Tensor,
    window: int | None,
    chosen: Tensor | None,
) -> Tensor:
    """Gradients of the tokens' keys if there is a window, else of compressed keys."""
    count, pieces, visitors = len(keys), 1, None
    if not count:
        return torch.zeros_like(keys)
    number_of_tiles = ceil_div(count, tiles.keys)
    if window is None:
        first, last = places.first[:: tiles.keys], places.end[tiles.keys - 1 :: tiles.keys]
        last = last if len(last) == len(first) else torch.cat([last, places.end[-1:]])
        visitors = torch.stack([first + places.rate - 1, last], 1)
        pieces = max(1, min(4 * num_sms(q) // number_of_tiles, ceil_div(len(q), 16)))
    sums = torch.empty(
        pieces, *keys.shape, dtype=keys.dtype if pieces == 1 else torch.float32, device=keys.device
    )
    some, bits, listed = number_of_tiles, None, None
    if chosen is not None:  # as many tiles at once as their bits and lists allow
        some = max(1, min(some, _BITS // (4 * len(q) * (tiles.keys // 32))))
    for first_tile in range(0, number_of_tiles, some):
        together = min(some, number_of_tiles - first_tile)
        if chosen is not None:
            bits = _bits(chosen, first_tile * tiles.keys, together * tiles.keys)
            visits = bits.unflatten(1, (together, -1)).ne(0).any(-1).T.contiguous().to(torch.int8)
            listed = visits.argsort(dim=1, descending=True, stable=True).int()
            counts = visits.sum(1, dtype=torch.int64)
            assert visitors is not None
            visitors[first_tile : first_tile + together] = torch.stack([torch.zeros_like(counts), counts], 1)
        compressed_key_gradient_kernel[(together * pieces,)](
            q,
            dout,
            keys,
            places.start,
            places.seen,
            visitors,
            listed,
            bits,
            lse,
            delta,
            sums,
            len(q),
            count,
            first_tile,
            window,
            scale,
            _width(bits),
            pieces,
            WINDOWED=window is not None,
            **_constants(q, tiles),
        )
    return sums[0] if pieces == 1 else sums.sum(0).to(keys.dtype)


def _bits(chosen: Tensor, first: int, count: int) -> Tensor:
    """Lists of keys [T, n] as bits [T, words], of `count` keys from number `first` on."""
    place = chosen - first
    inside = (place >= 0) & (place < count)
    bits = torch.zeros(len(chosen), ceil_div(count, 32), dtype=torch.int32, device=chosen.device)
    values = (torch.ones_like(place) << (place & 31)).masked_fill_(~inside, 0)
    # Each bit is added once, so that sums are the words.
    return bits.scatter_add_(1, (place >> 5).clamp_(0, bits.shape[1] - 1).long(), values)


def _programs(q: Tensor, tiles: Tiles) -> tuple[int]:
    return (len(q) * ceil_div(q.shape[1], tiles.queries),)


def _constants(q: Tensor, tiles: Tiles) -> dict[str, int]:
    return {
        "HEADS": q.shape[1],
        "DIM": q.shape[2],
        "BLOCK_DIM": max(16, next_power_of_2(q.shape[2])),
        "BLOCK_H": tiles.queries,
        "BLOCK_K": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _width(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[1]


def keys_of(block: _Block, keys: Tensor, compressed: Tensor) -> Tensor:
    """The keys of a block, [n, D]: tokens, then compressed ones."""
    return torch.cat([keys[block.key : block.last], compressed[slice(*block.compressed)]])


def seen_keys(
    block: _Block, places: CompressedKeys, window: int, chosen: Tensor | None, device: torch.device
) -> Tensor:
    """Mask of the keys of a block, in the order of `keys_of`, that its queries attend to, [queries, n]."""
    rows = slice(block.first, block.last)
    query = torch.arange(block.first, block.last, device=device)[:, None]
    token = torch.arange(block.key, block.last, device=device)
    seen = (token <= query) & (token > query - window) & (token >= places.start[rows])
    if block.compressed[1] > block.compressed[0]:
        column = torch.arange(*block.compressed, device=device)
        first, end = places.seen[rows].split(1, dim=1)
        among = (column >= first) & (column < end)
        if chosen is not None:
            # One more column for what is no key.
            place = (chosen[rows].long() - block.compressed[0]).clamp_(max=len(column))
            listed = torch.zeros(len(place), len(column) + 1, dtype=torch.bool, device=device)
            among = among & listed.scatter_(1, place, True)[:, :-1]
        seen = torch.cat([seen, among], 1)
    return seen


def scaled_products(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Scaled products of queries [queries, heads, D] with keys [n, D], [queries, heads, n] in at least
    float32; -inf for keys that a query does not see.
    """
    scores = _product(q.flatten(0, 1), k.T).mul_(scale).view(*q.shape[:2], len(k))
    return scores.masked_fill_(~seen[:, None], float("-inf"))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices of one dtype, in at least float32."""
    if a.is_cuda and a.itemsize == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    return at_least_float32(a) @ at_least_float32(b)
