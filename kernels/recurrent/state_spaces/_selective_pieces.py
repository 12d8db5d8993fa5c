"""The selective scan by kernels, on pieces of 32 tokens.

A document is divided into pieces, two for each chunk of 64, which run in parallel. The kernels
(`_selective_kernels.py`):

    local    the state at the end of a piece that starts from zero, and the sum of its steps; backward also
             the gradient at its start from its own tokens
    pass     in order over the pieces of a document: the state at the start of each; REVERSE: the gradient at
             the end of each
    scan     the outputs of a piece from the state at its start; or, for the backward pass, the state at the
             start of every 8 tokens
    grads    all gradients of a piece, 8 tokens at a time, last ones first

The state of a token has N elements per channel. The first three kernels hold a tile [N, channels] of it and
go from token to token, with loads of a few tokens in flight. `grads` takes one element of the state at a
time, and holds 8 tokens of it. Tokens past the end of a document have a step of zero, which changes no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, next_power_of_2, on_device_of
from liger_models.kernels.norms._norm_sums import column_sum
from liger_models.kernels.recurrent._chunk_table import ChunkTable
from liger_models.kernels.recurrent.state_spaces._selective_kernels import (
    grads_kernel,
    local_kernel,
    pass_kernel,
    scan_kernel,
)

SLAB = 2048  # channels at a time: bounds the memory for states


def run(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    table: ChunkTable,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states by the kernels."""
    x, dt, B, C = (_with_adjacent_columns(operand) for operand in (x, dt, B, C))
    D, dt_bias = D.contiguous(), dt_bias.contiguous()
    state = None if state is None else state.float().contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(len(table.first_segments), *A_log.shape, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        for begin in range(0, x.shape[1], SLAB):
            slab = slice(begin, begin + SLAB)
            part = _Slab(x[:, slab], dt[:, slab], _rates(A_log[slab]), B, C, D[slab], dt_bias[slab], table)
            starts, steps = part.local()
            part.pass_over(starts, steps, None if state is None else state[:, slab], final[:, slab])
            part.scan(starts, y[:, slab], None)
    return y, final


def run_grads(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    table: ChunkTable,
    dy: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of the operands in the order of `selective_scan`, by the kernels."""
    x, dt, B, C, dy = (_with_adjacent_columns(operand) for operand in (x, dt, B, C, dy))
    D, dt_bias = D.contiguous(), dt_bias.contiguous()
    dfinal = dfinal.float().contiguous()
    state = None if state is None else state.float().contiguous()
    like: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    dx, ddt = (torch.empty(operand.shape, dtype=operand.dtype, device=x.device) for operand in (x, dt))
    dA_log = torch.empty(A_log.shape, **like)
    dresidual, dbias = torch.empty(2, x.shape[1], **like)
    dstate = torch.empty(dfinal.shape, **like)
    dbc = torch.zeros(2, *B.shape, **like)
    with on_device_of(x):
        for begin in range(0, x.shape[1], SLAB):
            slab = slice(begin, begin + SLAB)
            part = _Slab(x[:, slab], dt[:, slab], _rates(A_log[slab]), B, C, D[slab], dt_bias[slab], table)
            starts, steps, dends = part.local(dy[:, slab])
            part.pass_over(starts, steps, None if state is None else state[:, slab], None)
            part.pass_over(dends, steps, dfinal[:, slab], dstate[:, slab], reverse=True)
            of_slab = part.grads(starts, dends, dy[:, slab], dx[:, slab], ddt[:, slab])
            drate, dresidual[slab], dbias[slab], added = of_slab
            dA_log[slab] = (drate * part.rates).T
            dbc += added
    return dx, ddt, dA_log, *dbc, dresidual, dbias, dstate


# A piece is half a chunk of 64: states and gradients of pieces, and states of every 8 tokens, exist for a
# slab of channels. A program is one warp with two channels a thread.
_PIECE, _GROUP, _TILE, _COLUMNS = 32, 4, 8, 64
BYTES_IN_BACKWARD = 4 * (2 / _PIECE + 1 / _TILE + 2 / _COLUMNS)
"""Bytes per token, channel and element of the state, for `SLAB` channels."""


class _Slab(NamedTuple):
    """Operands of the kernels for some channels."""

    x: Tensor
    dt: Tensor
    rates: Tensor  # A: [N, channels] float32
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    table: ChunkTable

    @property
    def pieces(self) -> int:
        return 2 * self.table.ranges.shape[1]

    def local(self, dy: Tensor | None = None) -> tuple[Tensor, ...]:
        """End states of pieces that start from zero, the sums of their steps, and gradients at starts."""
        (state, channels), pieces = self.rates.shape, self.pieces
        ends, steps = self._empty(pieces, state, channels), self._empty(pieces, channels)
        dstarts = None if dy is None else self._empty(pieces, state, channels)
        c, dy_stride = (None, 0) if dy is None else (self.C, dy.stride(0))
        if pieces:
            local_kernel[self._grid()](
                self.x,
                self.dt,
                self.B,
                c,
                dy,
                self.rates,
                self.dt_bias,
                self.table.ranges,
                ends,
                steps,
                dstarts,
                *self._strides(),
                dy_stride,
                pieces // 2,
                channels,
                **self._sizes(_GROUP if dy is None else _GROUP // 2),
            )
        return (ends, steps) if dstarts is None else (ends, steps, dstarts)

    def pass_over(
        self,
        values: Tensor,
        steps: Tensor,
        initial: Tensor | None,
        final: Tensor | None,
        reverse: bool = False,
    ) -> None:
        state, channels = self.rates.shape
        documents, strided = len(self.table.first_segments), final if initial is None else initial
        if documents:
            pass_kernel[(ceil_div(channels * state, 128), documents)](
                values,
                steps,
                self.rates,
                initial,
                final,
                self.table.cu_seqlens,
                self.table.segments,
                self.table.first_segments,
                self.table.segments.shape[1],
                0 if strided is None else strided.stride(0),
                channels,
                STATE=state,
                GROUP=8,
                BLOCK=128,
                REVERSE=reverse,
                num_warps=4,
            )

    def scan(self, starts: Tensor, y: Tensor | None, states: Tensor | None) -> None:
        channels = self.rates.shape[1]
        if self.pieces:
            scan_kernel[self._grid()](
                self.x,
                self.dt,
                self.B,
                self.C,
                self.D,
                self.rates,
                self.dt_bias,
                self.table.ranges,
                starts,
                y,
                states,
                *self._strides(),
                0 if y is None else y.stride(0),
                self.pieces // 2,
                channels,
                **self._sizes(),
            )

    def grads(
        self, starts: Tensor, dends: Tensor, dy: Tensor, dx: Tensor, ddt: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write dx and ddt; return the gradients of A [N, channels], of D, of the bias, and of B and C
        [2, T, N].
        """
        (state, channels), (tokens, _), pieces = self.rates.shape, self.x.shape, self.pieces
        states = self._empty(pieces, _PIECE // _TILE, state, channels)
        self.scan(starts, None, states)
        blocks = ceil_div(channels, _COLUMNS)
        sums, dbc = self._empty(2, pieces, channels), self._empty(2, blocks, tokens, state)
        drates = starts  # whose states are among the others
        drate, total = self._empty(state * channels), self._empty(2, channels)
        added = self._empty(2, tokens * state)
        if pieces:
            grads_kernel[(pieces, blocks)](
                self.x,
                self.dt,
                self.B,
                self.C,
                self.D,
                dy,
                self.rates,
                self.dt_bias,
                self.table.ranges,
                states,
                dends,
                dx,
                ddt,
                drates,
                sums,
                dbc,
                *self._strides(),
                dy.stride(0),
                dx.stride(0),
                ddt.stride(0),
                pieces // 2,
                channels,
                tokens,
                STATE=state,
                PIECE=_PIECE,
                TILE=_TILE,
                BLOCK_D=_COLUMNS,
                num_warps=1,
            )
        column_sum(drates.flatten(1), drate)
        column_sum(sums, *total)
        if tokens:
            column_sum(dbc.flatten(2), *added)
        return drate.view(state, channels), *total, added.view(2, tokens, state)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)

    def _strides(self) -> tuple[int, ...]:
        return tuple(operand.stride(0) for operand in (self.x, self.dt, self.B, self.C))

    def _sizes(self, group: int = _GROUP) -> dict[str, int]:
        state = self.rates.shape[0]
        block, columns = next_power_of_2(state), _COLUMNS if state <= 64 else _COLUMNS // 2
        sizes = {"STATE": state, "PIECE": _PIECE, "GROUP": group, "BLOCK_N": block, "BLOCK_D": columns}
        return {**sizes, "num_warps": max(1, block * columns // 1024)}

    def _grid(self) -> tuple[int, int]:
        return self.pieces, ceil_div(self.x.shape[1], self._sizes()["BLOCK_D"])


def _rates(A_log: Tensor) -> Tensor:
    return -A_log.float().T.contiguous().exp()


def _with_adjacent_columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
