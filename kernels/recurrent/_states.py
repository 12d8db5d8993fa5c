"""The pass of a delta rule's state over the chunks of documents, at two levels.

The state at the end of a segment of 64 chunks is linear in the state at its start: S_end = M S_start +
S_local. In documents with several segments, all segments compute M and S_local in parallel. A short pass over
the boundaries between segments then gives the states there, from which all segments run in parallel.
Gradients take the same path back, through M^T. No chain is longer than 64 chunks, for documents of any
length.

Segment boundaries depend on the document alone, so that packed documents equal separate ones bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, rows_to_copy
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    ChunkTable,
    block_of_keys,
    block_of_values,
    product_precision,
)
from liger_models.kernels.recurrent._state_kernels import boundaries_kernel

FETCHED = 128  # columns of values per program where tiles are fetched by the copy engine


class Boundaries(NamedTuple):
    """States at the boundaries between a document's segments, and transfers of the segments before them."""

    states: Tensor  # [boundaries, heads, dk, dv] float32
    transfers: Tensor  # M: [boundaries, heads, dk, dk] float32


def pass_states(
    kernel: Any,
    operands: tuple[Tensor, ...],
    tiles: list[Any],
    strides: tuple[int, ...],
    sizes: dict[str, int | str],
    table: ChunkTable,
    initial: Tensor | None,
    output: Tensor | None = None,
    states: Tensor | None = None,
    new: Tensor | None = None,
) -> tuple[Tensor, Boundaries | None]:
    """Pass states over the chunks by a rule's `states_kernel`.

    Args:
        kernel: the rule's kernel.
        operands: its first arguments.
        tiles: the next ones, from `tiles_of`; empty if the kernel takes none.
        strides: its strides.
        sizes: its constants.
        table: the chunks and segments.
        initial: [documents, heads, dk, dv] float32, or None for zeros.
        output: O, written if given.
        states: [chunks, heads, ...] in q's dtype, the state at the start of every chunk, as the kernel stores
            it; written if given.
        new: N, written if given.

    Returns:
        The final states [documents, heads, dk, dv] float32, and the states at the boundaries of segments.
    """
    heads, dk, dv = (int(sizes[name]) for name in ("HEADS", "DK", "DV"))
    documents, count = len(table.first_segments), table.segments.shape[1]
    like: dict[str, Any] = {"dtype": torch.float32, "device": operands[0].device}
    final = torch.empty(documents, heads, dk, dv, **like)
    if not documents:
        return final, None
    options = sizes | _launch_options(dv, tiles)
    block = options["BLOCK_V"]
    blocks = ceil_div(dv, block)
    places = table.cu_seqlens, table.segments, initial
    between = None
    if table.boundaries:
        between = Boundaries(
            torch.empty(table.boundaries, heads, dk, dv, **like),
            torch.empty(table.boundaries, heads, dk, dk, **like),
        )
        nothing = None, None, None, None
        kernel[(blocks + ceil_div(dk, block), heads, count)](
            *operands, *tiles, *places, *between, *nothing, *strides, count, LOCAL=True, **options
        )
        _join(between.states, between.transfers, table, operands[0].dtype, reverse=False)
    starts = None if between is None else between.states
    written = output, states, new, final
    if output is None and dk <= 128:  # with O, or wider, there is no room to fetch ahead, except for tiles
        options["num_stages"] = 2
    kernel[(blocks, heads, count)](
        *operands, *tiles, *places, starts, None, *written, *strides, count, LOCAL=False, **options
    )
    return final, between


def pass_state_grads(
    kernel: Any,
    operands: tuple[Tensor, ...],
    tiles: list[Any],
    strides: tuple[int, ...],
    sizes: dict[str, int | str],
    table: ChunkTable,
    dfinal: Tensor | None,
    between: Boundaries | None,
    dstates: Tensor,
    dnew: Tensor,
    dinitial: Tensor | None,
) -> None:
    """Pass the gradients of states back by a rule's `state_grads_kernel`.

    Write dS' of every chunk, dN or dV, and the gradient of the initial states if its tensor is given.
    """
    heads, dv = int(sizes["HEADS"]), int(sizes["DV"])
    count = table.segments.shape[1]
    if not count:
        return
    options = sizes | _launch_options(dv, tiles)
    grid = ceil_div(dv, options["BLOCK_V"]), heads, count
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    places = table.cu_seqlens, table.segments, dfinal
    ends = None
    if between is not None:
        ends = torch.empty_like(between.states)
        kernel[grid](
            *operands, *tiles, *places, ends, None, None, None, *strides, count, LOCAL=True, **options
        )
        _join(ends, between.transfers, table, operands[0].dtype, reverse=True)
    written = dstates, dnew, dinitial
    kernel[grid](*operands, *tiles, *places, ends, *written, *strides, count, LOCAL=False, **options)


def tiles_of(rows: tuple[Tensor, ...], values: Tensor, squares: tuple[Tensor, ...]) -> list[Any]:
    """Descriptors with which Hopper's copy engine fetches a chunk's rows [T, heads, 128], a program's columns
    of the values [T, heads, 128], and squares [chunks, heads, C, C]; None for each if it cannot.
    """
    if len(values) and all(x.shape[2] == 128 for x in (*rows, values)):
        tiles = rows_to_copy(CHUNK, *rows), rows_to_copy(CHUNK, values, columns=FETCHED)
        found = [*tiles[0], *tiles[1], *rows_to_copy(CHUNK, *(x.view(-1, 1, CHUNK) for x in squares))]
        if None not in found:
            return found
    return [None] * (len(rows) + 1 + len(squares))


def _launch_options(dv: int, tiles: list[Any]) -> dict[str, Any]:
    """Options of a pass. Tiles are fetched ahead and without registers, which leaves room for all columns."""
    if tiles and None not in tiles:
        return {"BLOCK_V": FETCHED, "num_warps": 8, "num_stages": 2}
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
        PRECISION=product_precision(dtype),
        REVERSE=reverse,
        num_warps=8,
        num_stages=1,
    )
