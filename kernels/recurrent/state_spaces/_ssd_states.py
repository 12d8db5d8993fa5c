"""The states of Mamba 2's scan between chunks, and what its launches share: operands, tiles and options.

    S' = exp(G_C) S + (exp(G_C - G) d X)^T B          dS = exp(G_C) dS' + (exp(G) dY)^T C

`_ssd_chunks.py` has the formulas. Documents are divided into segments as in `_states.py`. The state after a
segment is the state before it times one factor, plus the segment's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, next_power_of_2, rows_to_copy, shared_memory
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.recurrent._chunk_table import CHUNK, NARROWEST, ChunkTable, product_precision
from liger_models.kernels.recurrent._state_kernels import decayed_boundaries_kernel
from liger_models.kernels.recurrent._states import Boundaries
from liger_models.kernels.recurrent.state_spaces._ssd_kernels import pass_kernel

TILE = 64  # rows of a state per tile
# Warps and stages of kernels.
_SETTINGS = {"states": (4, 2), "pass": (8, 3), "group": (8, 3), "head": (4, 1)}


@dataclass(frozen=True, eq=False)
class Operands:
    """A pass's operands, and what all of its launches have in common, which is found once."""

    x: Tensor  # [T, heads, P]
    B: Tensor  # [T, groups, N]
    C: Tensor
    D: Tensor  # [heads]
    gates: Tensor  # d and G: [2, heads, T]
    state: Tensor | None  # [documents, heads, P, N]
    dy: Tensor | None = None
    dfinal: Tensor | None = None

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """Constants of the kernels."""
        heads, width = self.x.shape[1:]
        return {
            "PER_GROUP": heads // self.B.shape[1],
            "P": width,
            "N": self.B.shape[2],
            "PRECISION": product_precision(self.x.dtype),
        }

    @cached_property
    def strides(self) -> tuple[int, int, int]:
        return self.x.stride(0), self.B.stride(0), self.C.stride(0)

    @cached_property
    def pass_tiles(self) -> list[Any]:
        """`tiles_to_copy` for the passes of states: of some columns of x and dy, and all channels of B and C.
        Without dy, x takes its place.
        """
        values = (self.x,) if self.dy is None else (self.x, self.dy)
        of_values = tiles_to_copy(*values)
        tiles = [of_values[0], of_values[-1], *tiles_to_copy(self.B, self.C, columns=None)]
        return [None] * len(tiles) if None in tiles else tiles

    @cached_property
    def options(self) -> dict[str, dict[str, int]]:
        """Launch options of each kernel. States wider than 128, and GPUs with less shared memory than an
        A100, leave no room to load ahead.
        """
        room, N = shared_memory(self.x), self.B.shape[2]
        chosen = {}
        for kernel, (warps, stages) in _SETTINGS.items():
            if N > 128 and kernel != "pass":
                warps, stages = 8, 1
            if kernel == "group":  # which loads all tiles of a head ahead
                tiles = ceil_div(self.x.shape[2], TILE)
                ahead = 2 * tiles * TILE * (CHUNK + block_of_channels(N)) * self.x.element_size()
                stages = max(min(stages, room // ahead), 1)
            chosen[kernel] = {"num_warps": warps, "num_stages": stages if room >= 160 * 1024 else 1}
        return chosen


def boundary_states(own: Operands, table: ChunkTable) -> Boundaries | None:
    """The states between a document's segments, [boundaries, heads, P, N] float32, and the decays of the
    segments before them, [boundaries, heads]. None if there are no such segments.
    """
    if not table.boundaries:
        return None
    heads, (width, N) = own.x.shape[1], (own.x.shape[2], own.B.shape[2])
    like: dict[str, Any] = {"dtype": torch.float32, "device": own.x.device}
    states = torch.empty(table.boundaries, heads, width, N, **like)
    transfers = torch.empty(table.boundaries, heads, **like)
    pass_states(own, table, states[None], transfers, None, None, directions=1)
    _join(states[None], transfers, table, back=False)
    return Boundaries(states, transfers)


def with_gradients(own: Operands, table: ChunkTable, between: Boundaries) -> Tensor:
    """The states between a document's segments and their gradients: [2, boundaries, heads, P, N] float32."""
    boundaries = between.states.new_empty(2, *between.states.shape)
    boundaries[0].copy_(between.states)
    pass_states(own, table, boundaries, between.transfers, None, None, directions=1, back=True)
    _join(boundaries, between.transfers, table, back=True)
    return boundaries


def pass_states(
    own: Operands,
    table: ChunkTable,
    boundaries: Tensor | None,
    transfers: Tensor | None,
    states: Tensor | None,
    dstate: Tensor | None,
    first: int = 0,
    *,
    directions: int,
    back: bool = False,
) -> None:
    """Launch `pass_kernel` for as many heads as `states` holds, from `first` on; without, for the segments of
    all heads. With one direction, for the states only, or with `back` for their gradients.
    """
    (tokens, heads, width), N = own.x.shape, own.B.shape[2]
    dy = own.x if own.dy is None else own.dy  # not read
    count = table.segments.shape[1]
    held = heads if states is None else states.shape[2]
    block = min(block_of_channels(N), 128)
    tiles, options = own.pass_tiles, own.options["pass"]
    if states is None and None not in tiles:
        # Then three programs fit on a multiprocessor, which hold all segments.
        options = options | {"maxnreg": 80}
    pass_kernel[(directions * ceil_div(width, TILE) * ceil_div(N, block), held, count)](
        own.x,
        own.B,
        own.C,
        dy,
        own.gates,
        table.cu_seqlens,
        table.segments,
        own.state,
        own.dfinal,
        boundaries,
        transfers,
        states,
        dstate,
        *tiles,
        *own.strides,
        dy.stride(0),
        tokens,
        heads,
        table.ranges.shape[1],
        table.boundaries,
        count,
        first,
        held,
        BLOCK_P=TILE,
        BLOCK_N=block,
        **own.sizes,
        LOCAL=states is None,
        BACK=back,
        **options,
    )


def _join(boundaries: Tensor, transfers: Tensor, table: ChunkTable, *, back: bool) -> None:
    """Turn local states at boundaries [directions, boundaries, heads, P, N] into the true ones, or local
    gradients, the last of these.
    """
    _, count, heads, width, N = boundaries.shape
    size, block = width * N, 1024
    decayed_boundaries_kernel[(ceil_div(size, block), heads, len(table.first_segments))](
        boundaries,
        transfers,
        table.cu_seqlens,
        table.first_segments,
        count,
        heads,
        size,
        SEGMENT=table.segment,
        MOST=table.most,
        BLOCK=block,
        BACK=back,
        num_warps=4,
    )


def tiles_to_copy(*operands: Tensor, columns: int | None = TILE) -> list[Any]:
    """Descriptors with which Hopper's copy engine fetches tiles of operands [T, heads, D] without registers;
    None for each elsewhere, without tokens, and where states wider than 128 leave no room.
    """
    if gpu_of(operands[0]).capability[0] != 9 or operands[-1].shape[2] > 128 or not operands[0].shape[0]:
        return [None] * len(operands)
    return rows_to_copy(CHUNK, *operands, columns=columns)


def block_of_channels(N: int) -> int:
    return max(NARROWEST, next_power_of_2(N))
