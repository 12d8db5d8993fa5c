"""Tiles of scores with a chosen key, which the kernels of `flash_attention.py` visit; they skip the others.

A kernel finds them, 2 T^2 / (BLOCK_Q SIZE) words of bits at the least, and torch sorts them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, on_device_of, tl
from liger_models.kernels.attention._tile_sizes import Tiles
from liger_models.kernels.attention._tiles import end_key, first_key

_SOME = 32  # tiles of keys that a program tries


def tiles_to_visit(
    chosen: Tensor, size: int, bounds: Tensor | None, tiles: Tiles, of_keys: bool = False
) -> Tensor:
    """The tiles of keys that each tile of queries visits.

    Args:
        chosen: [T, words] or [T, groups, words] int32, as `attention` takes them.
        size: keys per block; 0: each bit is of one key.
        bounds: [2, T] int32 from `document_bounds`; None: one document.
        of_keys: return the tiles of queries that each tile of keys visits instead.

    Returns:
        [groups, tiles of queries, 1 + tiles of keys] int32: the number of tiles to visit, their indices in
        rising order, and then the others'. With `of_keys`, of keys and queries exchanged.
    """
    tokens, words = len(chosen), chosen.shape[-1]
    groups = 1 if chosen.dim() == 2 else chosen.shape[1]
    rows, columns = ceil_div(tokens, tiles.queries), ceil_div(tokens, tiles.keys)
    found = torch.zeros(groups, rows, columns, dtype=torch.int8, device=chosen.device)
    if tokens:
        with on_device_of(chosen):
            visited_tiles_kernel[rows, ceil_div(columns, _SOME), groups](
                chosen,
                bounds,
                found,
                tokens,
                words,
                columns,
                groups,
                CHOSEN_SIZE=size,
                BLOCK_Q=tiles.queries,
                BLOCK_K=tiles.keys,
                SOME=_SOME,
            )
    if of_keys:
        found = found.transpose(1, 2)
    order = torch.argsort(found, dim=-1, descending=True, stable=True)
    return torch.cat([found.sum(-1, keepdim=True), order], -1).int()


@jit
def visited_tiles_kernel(
    chosen,
    bounds,
    found,
    tokens,
    words,
    columns,
    groups,
    CHOSEN_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SOME: tl.constexpr,
):
    """Whether some of a tile's queries attend to some key of each of SOME tiles."""
    row = tl.program_id(0)
    group = tl.program_id(2)
    queries = row * BLOCK_Q + tl.arange(0, BLOCK_Q)
    firsts = first_key(queries, bounds, 0, tokens, None, False)
    ends = end_key(queries, bounds, 0, tokens, False)
    rows = chosen + group * words + tl.minimum(queries, tokens - 1).to(tl.int64) * (groups * words)
    found += (group.to(tl.int64) * tl.num_programs(0) + row) * columns
    start = tl.program_id(1) * SOME
    end = tl.minimum(start + SOME, tl.cdiv(tl.minimum(tl.max(ends, 0), tokens), BLOCK_K))
    for tile in range(tl.maximum(start, tl.min(firsts, 0) // BLOCK_K), end):
        column = tile * BLOCK_K
        if CHOSEN_SIZE:
            seen = _meets_chosen_block(rows, words, firsts, ends, column, CHOSEN_SIZE, BLOCK_K)
        else:
            seen = _has_chosen_key(rows, words, firsts, ends, column, BLOCK_K)
        tl.store(found + tile, tl.max(tl.where(queries < tokens, seen, 0), 0).to(tl.int8))


@jit
def _meets_chosen_block(rows, words, firsts, ends, column, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 for each query with a visible key of a chosen block in a tile."""
    first_block = tl.maximum(column - firsts, 0) // SIZE
    seen = firsts * 0
    for n in tl.static_range((BLOCK_K + SIZE - 2) // SIZE + 1):
        block = first_block + n
        bit = (tl.load(rows + block // 32, block < 32 * words, 0) >> (block % 32)) & 1
        start = firsts + block * SIZE
        end = tl.minimum(tl.minimum(start + SIZE, ends), column + BLOCK_K)
        seen = seen | tl.where(tl.maximum(start, column) < end, bit, 0)
    return seen


@jit
def _has_chosen_key(rows, words, firsts, ends, column, BLOCK_K: tl.constexpr):
    """1 for each query with a visible chosen key in a tile."""
    seen = firsts * 0
    for n in tl.static_range(BLOCK_K // 32):
        start = column + 32 * n
        word = start // 32 - firsts // 32
        bits = tl.load(rows + word, (word >= 0) & (word < words), 0)
        seen = seen | (bits & _bits_below(ends - start) & ~_bits_below(firsts - start))
    return (seen != 0).to(tl.int32)


@jit
def _bits_below(count):
    """A word with its first `count` bits; none if that is negative, and all from 32 on."""
    count = tl.maximum(count, 0)
    return tl.where(count >= 32, -1, (1 << tl.minimum(count, 31)) - 1)
