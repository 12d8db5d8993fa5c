"""The RG-LRU by kernels, on pieces of 32 tokens.

A document is divided into pieces, two for each chunk of 64, which run in parallel. The kernels
(`_rg_lru_kernels.py`):

    opening  which chunks begin a document that continues none
    local    the state at the end of a piece that starts from zero, and the product of its decays; backward,
             the gradient at its start from its own tokens
    pass     in order over the pieces of a document: the state at the start of each; REVERSE: the gradient at
             the end of each
    scan     the outputs of a piece from the state at its start
    grads    all gradients of a piece, 4 tokens at a time, last ones first, from states computed again

Every program has some channels of one head, and goes from token to token with loads of a few in flight.
Tokens past the end of a document have a decay of one and write nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, on_device_of
from liger_models.kernels.norms._norm_sums import column_sum
from liger_models.kernels.recurrent._chunk_table import ChunkTable
from liger_models.kernels.recurrent._rg_lru_kernels import (
    grads_kernel,
    local_kernel,
    opening_kernel,
    pass_kernel,
    scan_kernel,
)

PIECE = 32
GROUP_OF_GRADS = 4
_GROUP, _COLUMNS = 8, 64  # tokens in flight, fewer in `grads`; channels of a program of one warp


def run(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    state: Tensor | None,
    table: ChunkTable,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states, and the states at the starts of pieces [pieces, channels]."""
    x, gates = _with_adjacent_columns(x), _with_adjacent_columns(gates)
    state = None if state is None else state.float().contiguous()
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    like: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    final = torch.empty(len(table.first_segments), len(decay) + 1, **like)
    with on_device_of(x):
        opens = _opening(table, state)
        operands = x, gates, bias.contiguous(), decay.contiguous(), table.ranges, opens
        starts, decays = _local(*operands, None)
        _pass(starts, decays, state, final, table)
        if len(starts):
            scan_kernel[_grid(x, table)](
                *operands, starts, h, *_strides(x, gates), *h.stride()[:2], _chunks(table), **_sizes(x)
            )
    return h, final, starts


def run_grads(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    state: Tensor | None,
    table: ChunkTable,
    starts: Tensor,
    dh: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of x, gates, bias, decay and state, by the kernels."""
    x, gates, dh = (_with_adjacent_columns(operand) for operand in (x, gates, dh))
    state = None if state is None else state.float().contiguous()
    dx, dgates = torch.empty_like(x), torch.empty_like(gates)
    like: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    sums = torch.empty(3, len(starts), len(decay), **like)
    dbias, ddecay = torch.zeros(2, len(decay), **like), torch.zeros(len(decay), **like)
    states = torch.empty(len(starts), PIECE // GROUP_OF_GRADS, len(decay), **like)
    dstate = torch.empty(len(table.first_segments), len(decay) + 1, **like)
    with on_device_of(x):
        opens = _opening(table, state)
        operands = x, gates, bias.contiguous(), decay.contiguous(), table.ranges, opens
        dends, decays = _local(*operands, dh)
        _pass(dends, decays, dfinal.float().contiguous(), dstate, table, reverse=True)
        if len(starts):
            places = *_strides(x, gates), *dh.stride()[:2], *_strides(dx, dgates)
            grads_kernel[_grid(x, table)](
                *operands,
                *(starts, states, dh, dends, dx, dgates, sums),
                *places,
                _chunks(table),
                **_sizes(x, GROUP_OF_GRADS),
            )
            column_sum(sums[:2], *dbias)
            column_sum(sums[2], ddecay)
    by_head = dbias.view(2, x.shape[1], x.shape[2]).transpose(0, 1)
    return dx, dgates, by_head, ddecay, dstate


def _opening(table: ChunkTable, state: Tensor | None) -> Tensor:
    """[chunks] int32, one for chunks that begin a document which continues none."""
    documents = len(table.first_segments)
    opens = torch.zeros(_chunks(table), dtype=torch.int32, device=table.ranges.device)
    if documents:
        opening_kernel[(ceil_div(documents, 128),)](
            opens,
            state,
            table.cu_seqlens,
            table.segments,
            table.first_segments,
            table.segments.shape[1],
            0 if state is None else state.shape[1],
            documents,
            BLOCK=128,
            num_warps=4,
        )
    return opens


def _local(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    ranges: Tensor,
    opens: Tensor,
    dh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """End states of pieces that start from zero (with dh, gradients at starts), and products of decays."""
    pieces = 2 * ranges.shape[1]
    # Apart: the first are kept for the backward pass.
    values, decays = (torch.empty(pieces, len(decay), dtype=torch.float32, device=x.device) for _ in range(2))
    if pieces:
        grid = pieces, x.shape[1] * ceil_div(x.shape[2], _COLUMNS)
        of_dh = (0, 0) if dh is None else dh.stride()[:2]
        operands = x, gates, bias, decay, ranges, opens
        places = *_strides(x, gates), *of_dh, pieces // 2
        local_kernel[grid](*operands, dh, values, decays, *places, **_sizes(x))
    return values, decays


def _pass(
    values: Tensor,
    decays: Tensor,
    initial: Tensor | None,
    final: Tensor,
    table: ChunkTable,
    reverse: bool = False,
) -> None:
    documents, columns = final.shape
    if documents:
        pass_kernel[(ceil_div(columns, 128), documents)](
            values,
            decays,
            initial,
            final,
            table.cu_seqlens,
            table.segments,
            table.first_segments,
            table.segments.shape[1],
            columns - 1,
            GROUP=_GROUP,
            BLOCK=128,
            REVERSE=reverse,
            num_warps=4,
        )


def _chunks(table: ChunkTable) -> int:
    return table.ranges.shape[1]


def _grid(x: Tensor, table: ChunkTable) -> tuple[int, int]:
    return 2 * _chunks(table), x.shape[1] * ceil_div(x.shape[2], _COLUMNS)


def _strides(x: Tensor, gates: Tensor) -> tuple[int, ...]:
    return *x.stride()[:2], *gates.stride()[:3]


def _sizes(x: Tensor, group: int = _GROUP) -> dict[str, int]:
    sizes = {"HEADS": x.shape[1], "WIDTH": x.shape[2]}
    return {**sizes, "PIECE": PIECE, "GROUP": group, "BLOCK": _COLUMNS, "num_warps": 1}


def _with_adjacent_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
