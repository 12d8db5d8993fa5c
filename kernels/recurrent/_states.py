"""The pass of a delta rule's state over the chunks of documents, at two levels.

The state at the end of a segment is linear in the state at its start: S_end = M S_start + S_local. In
documents with several segments, all segments compute M and S_local in parallel. A short pass over the
boundaries between segments then gives the states there, from which all segments run in parallel. These states
and M are kept for the backward pass. Gradients take the same path back, through M^T. No chain is longer than
a segment, for documents of any length.

Segment boundaries depend only on the document and the number of heads (`_chunk_table.tokens_of_segment`), so
that packed documents equal separate ones bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, rows_to_copy
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    ChunkTable,
    block_of_keys,
    block_of_values,
    product_precision,
)
from liger_models.kernels.recurrent._state_kernels import boundaries_kernel

# Columns of values per program where tiles are fetched by the copy engine. In the passes that are local to
# segments two programs fit on a multiprocessor, and there are enough of them; three in the forward one, with
# so many registers.
COLUMNS = 128
LOCAL_COLUMNS = 64
LOCAL_REGISTERS = 168


class Tiles(NamedTuple):
    """Descriptors of a pass's operands for the copy engine, from `tiles_of`; empty if the kernel has none."""

    whole: list[Any]
    local: list[Any]  # for the pass that is local to segments


NO_TILES = Tiles([], [])


class Boundaries(NamedTuple):
    """States at the boundaries between a document's segments, and transfers of the segments before them."""

    states: Tensor  # [boundaries, heads, dk, dv] float32
    transfers: Tensor  # M: [boundaries, heads, dk, dk] float32


def save(ctx: Any, operands: tuple[Tensor | None, ...], between: Boundaries | None) -> None:
    """Keep the operands of an autograd function, and the states between segments, for its backward pass."""
    ctx.operands = len(operands)
    ctx.save_for_backward(*operands, *(between or ()))


def saved(ctx: Any) -> tuple[tuple[Any, ...], Boundaries | None]:
    """Return what `save` kept."""
    tensors = ctx.saved_tensors
    between = tensors[ctx.operands :]
    return tensors[: ctx.operands], Boundaries(*between) if between else None


def pass_states(
    kernel: Any,
    operands: tuple[Tensor, ...],
    tiles: Tiles,
    strides: tuple[int, ...],
    sizes: dict[str, int | str],
    table: ChunkTable,
    initial: Tensor | None,
    output: Tensor | None = None,
    states: Tensor | None = None,
    new: Tensor | None = None,
    between: Boundaries | None = None,
) -> tuple[Tensor, Boundaries | None]:
    """Pass states over the chunks by a rule's `states_kernel`.

    Args:
        kernel: the rule's kernel.
        operands: its first arguments.
        tiles: the next ones, from `tiles_of`; none if the kernel takes none.
        strides: its strides.
        sizes: its constants.
        table: the chunks and segments.
        initial: [documents, heads, dk, dv] float32, or None for zeros.
        output: O, written if given.
        states: [chunks, heads, ...] in q's dtype, the state at the start of every chunk, as the kernel stores
            it; written if given.
        new: N, written if given.
        between: the second result of an earlier call, to compute it once.

    Returns:
        The final states [documents, heads, dk, dv] float32, and the states at the boundaries of segments.
    """
    heads, dk, dv = (int(sizes[name]) for name in ("HEADS", "DK", "DV"))
    documents, count = len(table.first_segments), table.segments.shape[1]
    like: dict[str, Any] = {"dtype": torch.float32, "device": operands[0].device}
    final = torch.empty(documents, heads, dk, dv, **like)
    if not documents:
        return final, None
    places = table.cu_seqlens, table.segments, initial
    if table.boundaries and between is None:
        between = Boundaries(
            torch.empty(table.boundaries, heads, dk, dv, **like),
            torch.empty(table.boundaries, heads, dk, dk, **like),
        )
        nothing = None, None, None, None
        options = sizes | _launch_options(dv, tiles.local, LOCAL_COLUMNS, 2, LOCAL_REGISTERS)
        blocks = ceil_div(dv, options["BLOCK_V"]) + ceil_div(dk, options["BLOCK_V"])
        kernel[(blocks, heads, count)](
            *operands, *tiles.local, *places, *between, *nothing, *strides, count, LOCAL=True, **options
        )
        _join(between.states, between.transfers, table, operands[0].dtype, reverse=False)
    starts = None if between is None else between.states
    written = output, states, new, final
    options = sizes | _launch_options(dv, tiles.whole, COLUMNS, stages=3)
    if options["num_stages"] == 1 and output is None and dk <= 128:  # else there is no room to fetch ahead
        options["num_stages"] = 2
    kernel[(ceil_div(dv, options["BLOCK_V"]), heads, count)](
        *operands, *tiles.whole, *places, starts, None, *written, *strides, count, LOCAL=False, **options
    )
    return final, between


def pass_state_grads(
    kernel: Any,
    operands: tuple[Tensor, ...],
    tiles: Tiles,
    strides: tuple[int, ...],
    sizes: dict[str, int | str],
    table: ChunkTable,
    dfinal: Tensor | None,
    between: Boundaries | None,
    results: tuple[Tensor | None, ...],
) -> None:
    """Pass the gradients of states back by a rule's `state_grads_kernel`, which writes `results`. All of them
    are None in the pass that is local to segments.
    """
    heads, dv = int(sizes["HEADS"]), int(sizes["DV"])
    count = table.segments.shape[1]
    if not count:
        return
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    places = table.cu_seqlens, table.segments, dfinal
    ends = None
    if between is not None:
        ends = torch.empty_like(between.states)
        nothing = (None,) * len(results)
        options = sizes | _launch_options(dv, tiles.local, LOCAL_COLUMNS, stages=2)
        grid = ceil_div(dv, options["BLOCK_V"]), heads, count
        kernel[grid](*operands, *tiles.local, *places, ends, *nothing, *strides, count, LOCAL=True, **options)
        _join(ends, between.transfers, table, operands[0].dtype, reverse=True)
    options = sizes | _launch_options(dv, tiles.whole, COLUMNS, stages=2)
    grid = ceil_div(dv, options["BLOCK_V"]), heads, count
    kernel[grid](*operands, *tiles.whole, *places, ends, *results, *strides, count, LOCAL=False, **options)


def tiles_of(rows: tuple[Tensor, ...], values: tuple[Tensor, ...], squares: tuple[Tensor, ...]) -> Tiles:
    """Descriptors with which Hopper's copy engine fetches a chunk's rows [T, heads, 128], a program's columns
    of the values [T, heads, 128], and squares [chunks, heads, C, C]; None for each if it cannot, and on
    Blackwell, where passes over such tiles take more shared or tensor memory than there is.
    """
    none = [None] * (len(rows) + len(values) + len(squares))
    hopper = gpu_of(rows[0]).capability[0] == 9
    if not hopper or not len(rows[0]) or any(x.shape[2] != 128 for x in (*rows, *values)):
        return Tiles(none, none)
    of_rows = rows_to_copy(CHUNK, *rows)
    of_squares = rows_to_copy(CHUNK, *(x.view(-1, 1, CHUNK) for x in squares))
    found = (
        [*of_rows, *rows_to_copy(CHUNK, *values, columns=columns), *of_squares]
        for columns in (COLUMNS, LOCAL_COLUMNS)
    )
    return Tiles(*(none if None in tiles else tiles for tiles in found))


def count_blocks(dv: int, tiles: Tiles) -> int:
    """Programs that share a head's values in a pass."""
    return ceil_div(dv, _launch_options(dv, tiles.whole, COLUMNS, stages=2)["BLOCK_V"])


def _launch_options(
    dv: int, tiles: list[Any], columns: int, stages: int, registers: int | None = None
) -> dict[str, Any]:
    """Options of a pass. Tiles are fetched ahead, in `stages`, and without registers, which leaves room for
    more columns.
    """
    if tiles and None not in tiles:
        limit = {} if registers is None else {"maxnreg": registers}
        return {"BLOCK_V": columns, "num_warps": columns // 16, "num_stages": stages, **limit}
    return {"BLOCK_V": block_of_values(dv, 64), "num_warps": 4, "num_stages": 1}


def _join(
    boundaries: Tensor, transfers: Tensor, table: ChunkTable, dtype: torch.dtype, *, reverse: bool
) -> None:
    heads, dk, dv = boundaries.shape[1:]
    block = block_of_values(dv, 64)
    boundaries_kernel[(ceil_div(dv, block), heads, len(table.first_segments))](
        boundaries,
        transfers,
        table.cu_seqlens,
        table.first_segments,
        HEADS=heads,
        DK=dk,
        DV=dv,
        BLOCK_K=block_of_keys(dk),
        BLOCK_V=block,
        SEGMENT=table.segment,
        MOST=table.most,
        PRECISION=product_precision(dtype),
        REVERSE=reverse,
        num_warps=8,
        num_stages=1,
    )
