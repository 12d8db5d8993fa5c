"""Sort token-to-expert assignments by expert on the device, without synchronisation.

A counting sort in three launches: each chunk of assignments counts its experts; each expert sums its counts
over the chunks; each chunk places its assignments. The sort is stable: tokens keep their order within an
expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl
from liger_models.kernels.invariant.mode import is_batch_invariant


class ExpertOrder(NamedTuple):
    """The R assignments of tokens to experts, sorted by expert, and their division into tiles. R is T k less
    the empty slots (expert -1).

    A tile is up to `block` consecutive rows of one expert; each expert has at most one partial tile.

    Attributes:
        order: [R] int32. Row r is assignment order[r]: slot order[r] % k of token order[r] // k.
        position: [T k] int32, its inverse: assignment a is row position[a], or -1 if the slot is empty.
        offsets: [E + 1] int32. Expert e has the rows offsets[e] to offsets[e + 1] (exclusive).
        tile_expert, tile_row: the expert and first row of each tile, allocated for the worst distribution of
            R rows; unused tiles have expert -1.
        num_tiles: [1] int32, the number of used tiles.
        block, top_k: rows per tile, and k.
        full: no slot is empty, so R is T k. Else R may exceed the number of assignments, offsets[E], which
            only the device knows; the rows beyond it are nobody's.
        first: of a window (`windows`), the number of its first row among all rows, which `position` counts.
    """

    order: Tensor
    position: Tensor
    offsets: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    num_tiles: Tensor
    block: int
    top_k: int
    full: bool
    first: int = 0

    @property
    def num_rows(self) -> int:
        return self.order.numel()

    def with_rows(self, num_rows: int) -> ExpertOrder:
        """The same order, which was made for at least `num_rows` before their number was known."""
        return self._replace(order=self.order[:num_rows])


def sort_by_expert(
    experts: Tensor, num_experts: int, num_rows: int | None = None, expected: int | None = None
) -> ExpertOrder:
    """Sort the assignments `experts` [T, k], integers in [0, num_experts), or -1 for empty slots. `num_rows`
    is the number of the others, or more (`with_rows`), and `expected` an estimate. Nothing is checked.
    """
    slots, top_k = experts.numel(), experts.shape[1]
    full = num_rows is None and expected is None
    num_rows = slots if num_rows is None else num_rows
    block = _block_rows(num_rows if expected is None else expected, num_experts)
    most = _most_tiles(num_rows, block, num_experts)
    order, position, offsets, tile_expert, tile_row, num_tiles = (
        torch.empty(size, dtype=torch.int32, device=experts.device)
        for size in (num_rows, slots, num_experts + 1, most, most, 1)
    )
    sorted_rows = ExpertOrder(order, position, offsets, tile_expert, tile_row, num_tiles, block, top_k, full)
    if not num_rows:
        offsets.zero_()
        position.fill_(-1)
        num_tiles.zero_()
        return sorted_rows
    block_experts = next_power_of_2(num_experts)
    # A tile of chunk x experts has 16,384 elements: 64 registers for each of 256 threads. Comparing a
    # chunk's rows with each other, instead of sums along it, took 59 us, not 39, on an H200 (64 experts).
    chunk = max(1, min(1024, 16384 // block_experts))
    chunks = ceil_div(slots, chunk)
    counts = torch.empty(num_experts, chunks, dtype=torch.int32, device=experts.device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    experts = experts.contiguous()
    sizes = {"CHUNK": chunk, "BLOCK_EXPERTS": block_experts}
    block_tiles = max(1, min(64, 8192 // block_experts))
    with on_device_of(experts):
        _count_kernel[(chunks,)](experts, counts, slots, num_experts, **sizes, num_warps=8)
        _sum_counts_kernel[(num_experts,)](counts, totals, chunks, BLOCK=min(4096, next_power_of_2(chunks)))
        _place_kernel[(chunks,)](
            experts,
            counts,
            totals,
            order,
            position,
            offsets,
            slots,
            num_experts,
            **sizes,
            num_warps=8,
        )
        _tiles_kernel[(ceil_div(most, block_tiles),)](
            offsets,
            tile_expert,
            tile_row,
            num_tiles,
            num_experts,
            most,
            BLOCK=block,
            BLOCK_TILES=block_tiles,
            BLOCK_EXPERTS=block_experts,
        )
    return sorted_rows


def windows(order: ExpertOrder, most: int) -> list[ExpertOrder]:
    """Divide an order whose number of rows only the device knows into orders of `most` rows each, the last of
    fewer. Usually only the first has rows.
    """
    if not order.num_rows:
        return [order]
    num_experts, count = order.offsets.numel() - 1, ceil_div(order.num_rows, most)
    block_experts = next_power_of_2(num_experts)
    block_tiles = max(1, min(64, 8192 // block_experts))
    most_tiles = _most_tiles(min(most, order.num_rows), order.block, num_experts)
    each = 4 * ceil_div(max(num_experts + 1, most_tiles), 4)  # parts of these tables start at whole 16 bytes
    tables = torch.empty(count, 4, each, dtype=torch.int32, device=order.order.device)
    with on_device_of(tables):
        _windows_kernel[(ceil_div(most_tiles, block_tiles), count)](
            order.offsets,
            tables,
            each,
            num_experts,
            most,
            order.num_rows,
            most_tiles,
            BLOCK=order.block,
            BLOCK_TILES=block_tiles,
            BLOCK_EXPERTS=block_experts,
        )
    found = []
    for i, (offsets, tile_expert, tile_row, num_tiles) in enumerate(map(tuple, tables)):
        rows = order.order[i * most : (i + 1) * most]
        tiles = slice(_most_tiles(len(rows), order.block, num_experts))
        window = order._replace(order=rows, offsets=offsets[: num_experts + 1], num_tiles=num_tiles[:1])
        found.append(
            window._replace(tile_expert=tile_expert[tiles], tile_row=tile_row[tiles], first=i * most)
        )
    return found


def split_tiles(order: ExpertOrder, first_tokens: int) -> tuple[ExpertOrder, ExpertOrder]:
    """The same rows in two launches: the tiles with only rows of the first tokens, and all other tiles.

    Within an expert the rows of the first tokens come first, so both together are as many tiles as before.
    """
    most = order.tile_expert.numel()
    if not most:
        return order, order
    num_experts = order.offsets.numel() - 1
    block_experts = next_power_of_2(num_experts)
    block_tiles = max(1, min(64, 8192 // block_experts))
    each = 4 * ceil_div(most, 4)  # parts of these tables start at whole 16 bytes
    tables = torch.empty(2, 3, each, dtype=torch.int32, device=order.order.device)
    with on_device_of(tables):
        _split_tiles_kernel[(ceil_div(most, block_tiles), 2)](
            order.order,
            order.offsets,
            tables,
            each,
            first_tokens * order.top_k,
            order.num_rows.bit_length(),
            num_experts,
            most,
            BLOCK=order.block,
            BLOCK_TILES=block_tiles,
            BLOCK_EXPERTS=block_experts,
        )
    own, rest = (
        order._replace(tile_expert=expert[:most], tile_row=row[:most], num_tiles=count[:1])
        for expert, row, count in map(tuple, tables)
    )
    return own, rest


def _most_tiles(num_rows: int, block: int, num_experts: int) -> int:
    return min(num_rows, num_rows // block + num_experts)


def _block_rows(num_rows: int, num_experts: int) -> int:
    """128, or 64 if an even load would leave half of a tile empty."""
    return 64 if num_rows <= 64 * num_experts and not is_batch_invariant() else 128


@jit
def _count_kernel(experts, counts, slots, num_experts, CHUNK: tl.constexpr, BLOCK_EXPERTS: tl.constexpr):
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    assignment = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = tl.load(experts + assignment, assignment < slots, -1)
    expert = tl.arange(0, BLOCK_EXPERTS)
    count = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert * chunks + chunk, count, expert < num_experts)


@jit
def _sum_counts_kernel(counts, totals, chunks, BLOCK: tl.constexpr):
    """Replace an expert's counts by the number of its assignments in earlier chunks."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        count = tl.load(counts + expert * chunks + chunk, chunk < chunks, 0)
        tl.store(counts + expert * chunks + chunk, before + tl.cumsum(count, 0) - count, chunk < chunks)
        before += tl.sum(count, 0)
    tl.store(totals + expert, before)


@jit
def _place_kernel(
    experts,
    counts,
    totals,
    order,
    position,
    offsets,
    slots,
    num_experts,
    CHUNK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, BLOCK_EXPERTS)
    real = expert < num_experts
    total = tl.load(totals + expert, real, 0)
    end = tl.cumsum(total, 0)
    if chunk == 0:
        tl.store(offsets + expert + 1, end, real)
        tl.store(offsets, 0)
    base = end - total + tl.load(counts + expert * chunks + chunk, real, 0)
    assignment = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = assignment < slots
    mine = tl.load(experts + assignment, mask, -1)
    hit = (mine[:, None] == expert[None, :]).to(tl.int32)
    earlier = tl.cumsum(hit, 0) - hit
    row = tl.sum(hit * (base[None, :] + earlier), 1)
    tl.store(position + assignment, tl.where(mine < 0, -1, row), mask)
    tl.store(order + row, assignment, mask & (mine >= 0))


@jit
def _tiles_kernel(
    offsets,
    tile_expert,
    tile_row,
    num_tiles,
    num_experts,
    most,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_EXPERTS)
    mask = expert < num_experts
    start = tl.load(offsets + expert, mask, 0)
    end = tl.load(offsets + expert + 1, mask, 0)
    _write_tiles(start, end, expert, tile_expert, tile_row, num_tiles, most, BLOCK, BLOCK_TILES)


@jit
def _windows_kernel(
    offsets,
    tables,
    table_rows,
    num_experts,
    rows,
    num_rows,
    most,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Write four tables of `table_rows` elements per window: offsets, tile_expert, tile_row, num_tiles."""
    window = tl.program_id(1)
    first_row = window * rows
    found = tl.minimum(rows, num_rows - first_row)
    of_window = tables + window * 4 * table_rows
    expert = tl.arange(0, BLOCK_EXPERTS)
    mask = expert < num_experts
    start = tl.minimum(tl.maximum(tl.load(offsets + expert, mask, 0) - first_row, 0), found)
    end = tl.minimum(tl.maximum(tl.load(offsets + expert + 1, mask, 0) - first_row, 0), found)
    if tl.program_id(0) == 0:
        tl.store(of_window, 0)
        tl.store(of_window + expert + 1, end, mask)
    tiles = of_window + table_rows
    _write_tiles(
        start, end, expert, tiles, tiles + table_rows, tiles + 2 * table_rows, most, BLOCK, BLOCK_TILES
    )


@jit
def _split_tiles_kernel(
    order,
    offsets,
    tables,
    table_rows,
    first_slots,
    steps,
    num_experts,
    most,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Write three tables of `table_rows` elements per part: tile_expert, tile_row, num_tiles."""
    part = tl.program_id(1)
    tiles = tables + part * 3 * table_rows
    expert = tl.arange(0, BLOCK_EXPERTS)
    mask = expert < num_experts
    start = tl.load(offsets + expert, mask, 0)
    end = tl.load(offsets + expert + 1, mask, 0)
    low, high = start, end  # by bisection: the first row of an expert that is not in a first slot
    for _ in range(0, steps):
        middle = (low + high) // 2
        before = tl.load(order + middle, low < high, first_slots) < first_slots
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    whole = tl.where(low == end, end - start, (low - start) // BLOCK * BLOCK)
    border = start + whole
    start, end = tl.where(part == 0, start, border), tl.where(part == 0, border, end)
    _write_tiles(
        start, end, expert, tiles, tiles + table_rows, tiles + 2 * table_rows, most, BLOCK, BLOCK_TILES
    )


@jit
def _write_tiles(
    start,
    end,
    expert,
    tile_expert,
    tile_row,
    num_tiles,
    most,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write this program's tiles of the rows from `start` to `end` of each expert."""
    tiles = (end - start + BLOCK - 1) // BLOCK
    last = tl.cumsum(tiles, 0)
    first = last - tiles
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    mine = (first[None, :] <= tile[:, None]) & (tile[:, None] < last[None, :])  # of at most one expert
    which = tl.sum(tl.where(mine, expert[None, :] + 1, 0), 1) - 1
    row = tl.sum(tl.where(mine, start[None, :] + (tile[:, None] - first[None, :]) * BLOCK, 0), 1)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(tiles))
    tl.store(tile_expert + tile, which, tile < most)
    tl.store(tile_row + tile, row, tile < most)
