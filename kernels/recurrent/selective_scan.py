"""Selective scan, the state space layer of Mamba (Gu and Dao, 2023, arXiv:2312.00752, algorithm 2).

For every channel, with a state h [N] that starts at zero in each document:

    d_t = softplus(dt_t + dt_bias)
    a_t = exp(-exp(A_log) d_t)                            [N]
    h_t = a_t h_{t-1} + d_t x_t B_t
    y_t = C_t . h_t + D x_t

Everything is computed in float32. B and C are shared by all channels.

Gradients, with g_t the gradient of h_t, w_t = g_t a_t h_{t-1} and A = -exp(A_log):

    g_t  = C_t dy_t + a_{t+1} g_{t+1}                     within the document
    dx_t = D dy_t + d_t (g_t . B_t)
    dd_t = x_t (g_t . B_t) + A . w_t,                     ddt_t = dd_t sigmoid(dt_t + dt_bias)
    dB_t = sum over channels of g_t d_t x_t,              dC_t  = sum over channels of dy_t h_t
    dA_log = A times the sum over t of w_t d_t

Only the operands are kept for the backward pass, which computes the states again. They never exist for all
tokens at once: a document is divided into pieces of 32 tokens, two for each chunk of 64, which run in
parallel. The kernels:

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

Bytes moved at the least, for T tokens and d channels of b bytes: forward 3 T d b, backward 5 T d b. The
exponentials take longer: T d N of them, twice in the forward pass and three times in the backward pass.
"""

# mypy: disable-error-code="assignment"
# mypy cannot type tuples of Triton values that grow in unrolled loops.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)
from liger_models.kernels.norms._norm_sums import column_sum
from liger_models.kernels.recurrent._chunk_table import ChunkTable, chunk_table
from liger_models.kernels.recurrent._chunk_tiles import log1p

WIDEST_STATE = 256
SLAB = 2048  # channels at a time: bounds the memory for states


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan of Mamba (Gu and Dao, 2023, arXiv:2312.00752) over packed documents.

    Args:
        x: [T, d], float dtype; rows may lie apart.
        dt: [T, d], the step before bias and softplus.
        A_log: [d, N], N <= 256; the logarithm of the rates of decay.
        B, C: [T, N].
        D, dt_bias: [d].
        cu_seqlens: [documents + 1] integers that rise from 0 to T; None for one document.
        state: [documents, d, N] float32, initial states; None for zeros.

    Returns:
        y [T, d] in x's dtype, and the final state of every document, as `state`; float64 for float64
        operands. Gradients flow through both. Running it again gives the same bits.

    Raises:
        ValueError: shapes that do not fit, or tensors on several devices.
        TypeError: x is not floating point.
    """
    _check(x, dt, A_log, B, C, (D, dt_bias), cu_seqlens, state)
    return _SelectiveScan.apply(x, dt, A_log, B, C, D, dt_bias, state, cu_seqlens)


def selective_scan_plain(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `selective_scan`, in slabs of channels."""
    bounds = _Bounds.of(cu_seqlens, x)
    outputs, finals = [], []
    for slab in _slabs(x, A_log.shape[1]):
        part = _Recurrence.of(x, dt, A_log, B, state, dt_bias, slab, bounds)
        h = part.states()
        wide = at_least_float32(x[:, slab])
        y = (h * at_least_float32(C)[:, None]).sum(-1) + at_least_float32(D[slab]) * wide
        outputs.append(y.to(x.dtype))
        finals.append(bounds.at_ends(h, part.initial))
    return torch.cat(outputs, 1), torch.cat(finals, 1)


def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Process one further token of every sequence, for decoding.

    Args:
        x, dt, B, C: as in `selective_scan`, with sequences in place of tokens.
        A_log, D, dt_bias: as there.
        state: [sequences, d, N] float32.

    Returns:
        y [sequences, d] in x's dtype, and the new state, a new tensor.
    """
    wide, step = at_least_float32(x), _step(dt, dt_bias)
    decay = torch.exp(-at_least_float32(A_log).exp() * step[..., None])
    state = decay * state + (step * wide)[..., None] * at_least_float32(B)[:, None]
    y = (state * at_least_float32(C)[:, None]).sum(-1) + at_least_float32(D) * wide
    return y.to(x.dtype), state


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        *tensors, cu_seqlens = operands
        ctx.save_for_backward(*operands)
        ctx.table = None
        if use_triton(*tensors):
            ctx.table = chunk_table(cu_seqlens, len(tensors[0]), tensors[0].device)
            with_table: list[Any] = [*tensors, ctx.table]
            return _run(*with_table)
        return selective_scan_plain(*operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        run: Any = _plain_grads if ctx.table is None else _run_grads
        found = run(*tensors, cu_seqlens if ctx.table is None else ctx.table, dy, dfinal)
        return *(
            None if given is None else gradient.to(given.dtype)
            for gradient, given in zip(found, tensors, strict=True)
        ), None


def _plain_grads(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of the operands in the order of `selective_scan`, in float32 or float64."""
    bounds = _Bounds.of(cu_seqlens, x)
    wide_b, wide_c = at_least_float32(B)[:, None], at_least_float32(C)[:, None]
    dB, dC = torch.zeros_like(wide_b[:, 0]), torch.zeros_like(wide_c[:, 0])
    by_channel: list[tuple[Tensor, ...]] = []
    for slab in _slabs(x, A_log.shape[1]):
        part = _Recurrence.of(x, dt, A_log, B, state, dt_bias, slab, bounds)
        h, wide, upstream = part.states(), at_least_float32(x[:, slab]), at_least_float32(dy[:, slab])
        g = part.gradients(wide_c * upstream[..., None], dfinal[:, slab])
        w = g * part.decay * part.before(h)
        read = (g * wide_b).sum(-1)
        dstep = wide * read + (w * part.rate).sum(-1)
        ddt = dstep * torch.sigmoid(at_least_float32(dt[:, slab]) + at_least_float32(dt_bias[slab]))
        dB += (g * (part.step * wide)[..., None]).sum(1)
        dC += (h * upstream[..., None]).sum(1)
        by_channel.append(
            (
                (at_least_float32(D[slab]) * upstream + part.step * read),
                ddt,
                (part.rate * (w * part.step[..., None]).sum(0)).T,
                (wide * upstream).sum(0)[None],
                ddt.sum(0)[None],
                bounds.at_starts(part.decay * g, dfinal[:, slab]).transpose(1, 2).flatten(0, 1),
            )
        )
    dx, ddt, dA_log, dD, dbias, dstate = (torch.cat(parts, 1) for parts in zip(*by_channel, strict=True))
    dstate = dstate.unflatten(0, (len(dfinal), -1)).transpose(1, 2)
    return dx, ddt, dA_log.T, dB, dC, dD[0], dbias[0], dstate


class _Bounds(NamedTuple):
    """Documents of a packed row."""

    first: Tensor  # [documents], each document's first token, T for one without tokens
    last: Tensor  # [documents], its last token, T for one without tokens
    begins: Tensor  # [T] bool, the first tokens

    @staticmethod
    def of(cu_seqlens: Tensor | None, x: Tensor) -> _Bounds:
        if cu_seqlens is None:
            cu_seqlens = torch.arange(2, device=x.device) * len(x)
        first, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        nothing = torch.full_like(first, len(x))
        opening, last = (torch.where(end > first, token, nothing) for token in (first, end - 1))
        begins = torch.zeros(len(x) + 1, dtype=torch.bool, device=x.device).index_fill(0, opening, True)
        return _Bounds(opening, last, begins[:-1])

    def at_starts(self, values: Tensor, otherwise: Tensor) -> Tensor:
        """Values [T, ...] at first tokens, `otherwise` [documents, ...] for a document without tokens."""
        return self._at(self.first, values, otherwise)

    def at_ends(self, values: Tensor, otherwise: Tensor) -> Tensor:
        return self._at(self.last, values, otherwise)

    def _at(self, token: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
        exists = (token < len(values)).view(-1, *[1] * (values.dim() - 1))
        padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return torch.where(exists, padded[token], otherwise)

    def to_starts(self, values: Tensor, tokens: int) -> Tensor:
        """Values [documents, ...] at first tokens, zero elsewhere: [T, ...]."""
        return values.new_zeros(tokens + 1, *values.shape[1:]).index_add(0, self.first, values)[:-1]

    def to_ends(self, values: Tensor, tokens: int) -> Tensor:
        return values.new_zeros(tokens + 1, *values.shape[1:]).index_add(0, self.last, values)[:-1]


class _Recurrence(NamedTuple):
    """h_t = decay_t h_{t-1} + written_t for some channels, in float32 or float64."""

    bounds: _Bounds
    step: Tensor  # [T, channels]
    rate: Tensor  # A: [channels, N]
    decay: Tensor  # [T, channels, N]
    written: Tensor  # [T, channels, N]
    initial: Tensor  # [documents, channels, N]

    @staticmethod
    def of(
        x: Tensor,
        dt: Tensor,
        A_log: Tensor,
        B: Tensor,
        state: Tensor | None,
        dt_bias: Tensor,
        slab: slice,
        bounds: _Bounds,
    ) -> _Recurrence:
        step, rate = _step(dt[:, slab], dt_bias[slab]), -at_least_float32(A_log[slab]).exp()
        written = (step * at_least_float32(x[:, slab]))[..., None] * at_least_float32(B)[:, None]
        decay = (step[..., None] * rate).exp()
        if state is None:
            initial = written.new_zeros(len(bounds.first), *written.shape[1:])
        else:
            initial = state[:, slab].to(written.dtype)
        return _Recurrence(bounds, step, rate, decay, written, initial)

    def states(self) -> Tensor:
        """h: [T, channels, N]."""
        kept = self.decay.masked_fill(self.bounds.begins[:, None, None], 0)
        return _prefix(kept, self.written + self.decay * self._from_initial())

    def before(self, h: Tensor) -> Tensor:
        """The state before each token."""
        shifted = F.pad(h, (0, 0, 0, 0, 1, 0))[: len(h)]
        return shifted.masked_fill(self.bounds.begins[:, None, None], 0) + self._from_initial()

    def gradients(self, dh: Tensor, dfinal: Tensor) -> Tensor:
        """g, from the gradient of h by the outputs and that of the final states."""
        kept = self.decay.masked_fill(self.bounds.begins[:, None, None], 0)
        following = F.pad(kept, (0, 0, 0, 0, 0, 1))[1:]
        given = dh + self.bounds.to_ends(dfinal.to(dh.dtype), len(dh))
        return _prefix(following.flip(0), given.flip(0)).flip(0)

    def _from_initial(self) -> Tensor:
        return self.bounds.to_starts(self.initial, len(self.decay))


def _prefix(decay: Tensor, added: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + added_t over the first dimension: token by token in blocks of 16 side by side,
    and so over the blocks.
    """
    tokens, width = len(added), min(16, len(added))
    if tokens < 2:
        return added
    decays, terms = (
        F.pad(values, (0, 0, 0, 0, 0, -tokens % width)).unflatten(0, (-1, width)).unbind(1)
        for values in (decay, added)
    )
    h, reach = [terms[0]], [decays[0]]
    for d, term in zip(decays[1:], terms[1:], strict=True):
        h.append(torch.addcmul(term, d, h[-1]))
        reach.append(d * reach[-1])
    inside = torch.stack(h, 1)
    if len(inside) > 1:
        before = F.pad(_prefix(reach[-1], h[-1]), (0, 0, 0, 0, 1, 0))[:-1]
        inside = torch.addcmul(inside, torch.stack(reach, 1), before[:, None])
    return inside.flatten(0, 1)[:tokens]


def _slabs(x: Tensor, states: int) -> Iterator[slice]:
    """Channels of which at most about two million elements of the state of all tokens exist at once."""
    size = max(1, (1 << 21) // max(1, len(x) * states))
    for begin in range(0, x.shape[1], size):
        yield slice(begin, begin + size)


def _step(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """d: [T, channels]."""
    return F.softplus(at_least_float32(dt) + at_least_float32(dt_bias))


def _run(
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


def _run_grads(
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


def _check(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    by_channel: tuple[Tensor, Tensor],
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    if not x.is_floating_point():
        raise TypeError(f"expected a floating point tensor, found {x.dtype}")
    if x.dim() != 2 or dt.shape != x.shape:
        raise ValueError(f"x is {tuple(x.shape)}, dt {tuple(dt.shape)}; expected [T, d] twice")
    if A_log.dim() != 2 or len(A_log) != x.shape[1] or not 1 <= A_log.shape[1] <= WIDEST_STATE:
        found = f"A_log is {tuple(A_log.shape)}"
        raise ValueError(f"{found}; expected ({x.shape[1]}, N) with 1 <= N <= {WIDEST_STATE}")
    expected = len(x), A_log.shape[1]
    if B.shape != expected or C.shape != expected:
        raise ValueError(f"B is {tuple(B.shape)}, C {tuple(C.shape)}; expected {expected} twice")
    if any(tensor.shape != x.shape[1:] for tensor in by_channel):
        found = ", ".join(str(tuple(tensor.shape)) for tensor in by_channel)
        raise ValueError(f"D and dt_bias are {found}; expected ({x.shape[1]},)")
    if state is not None:
        documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        if state.shape != (documents, *A_log.shape):
            raise ValueError(f"state is {tuple(state.shape)}; expected {(documents, *A_log.shape)}")


@jit
def _softplus(raw):
    return tl.maximum(raw, 0.0) + log1p(tl.exp(-tl.abs(raw)))


@jit
def _bounds_of(ranges, chunks, piece, PIECE: tl.constexpr):
    """First token of a piece, and the token after its last; equal, or reversed, if it has none."""
    first = tl.load(ranges + piece // 2) + piece % 2 * PIECE
    return first, tl.minimum(first + PIECE, tl.load(ranges + chunks + piece // 2))


@jit
def _load(values, token, stride, column, mask):
    return tl.load(values + token.to(tl.int64) * stride + column, mask, 0.0).to(tl.float32)


@jit
def local_kernel(
    x,
    dt,
    B,
    C,
    dy,
    rates,
    dt_bias,
    ranges,
    ends,
    steps,
    dstarts,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    dy_stride,
    chunks,
    channels,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dstarts: None in the forward pass, as are C and dy."""
    piece = tl.program_id(0)
    first, end = _bounds_of(ranges, chunks, piece, PIECE)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    element = tl.arange(0, BLOCK_N)
    exists, part = column < channels, element < STATE
    tile = element[:, None] * channels + column[None, :]
    inside = part[:, None] & exists[None, :]
    rate = tl.load(rates + tile, inside, 0.0) * 1.4426950408889634
    bias = tl.load(dt_bias + column, exists, 0.0).to(tl.float32)
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    decay = tl.zeros([BLOCK_N, BLOCK_D], tl.float32) + 1.0
    dstart = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for begin in range(first, end, GROUP):
        step_of, write_of, b_of, c_of, dy_of = (), (), (), (), ()
        for nth in tl.static_range(GROUP):
            token = begin + nth
            real = exists & (token < end)
            step = tl.where(real, _softplus(_load(dt, token, dt_stride, column, real) + bias), 0.0)
            step_of += (step,)
            write_of += (step * _load(x, token, x_stride, column, real),)
            b_of += (_load(B, token, b_stride, element, part & (token < end)),)
            if dstarts is not None:
                c_of += (_load(C, token, c_stride, element, part & (token < end)),)
                dy_of += (_load(dy, token, dy_stride, column, real),)
        for nth in tl.static_range(GROUP):
            a = tl.exp2(step_of[nth][None, :] * rate)
            state = tl.fma(a, state, b_of[nth][:, None] * write_of[nth][None, :])
            total += step_of[nth]
            if dstarts is not None:
                decay *= a
                dstart = tl.fma(decay, c_of[nth][:, None] * dy_of[nth][None, :], dstart)
    place = piece.to(tl.int64) * STATE * channels + tile
    tl.store(ends + place, state, inside)
    if dstarts is not None:
        tl.store(dstarts + place, dstart, inside)
    tl.store(steps + piece.to(tl.int64) * channels + column, total, exists)


@jit
def pass_kernel(
    values,
    steps,
    rates,
    initial,
    final,
    cu_seqlens,
    segments,
    first_segments,
    count,
    document_stride,
    channels,
    STATE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """values: states at the ends of pieces that start from zero -> states at their starts, in place; REVERSE:
    gradients at the starts -> gradients at the ends.

    initial, final: [documents, channels, N], or None; where the pass begins, and where it ends.
    """
    document = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < STATE * channels
    column = place % channels
    rate = tl.load(rates + place, inside, 0.0) * 1.4426950408889634
    length = tl.load(cu_seqlens + document + 1) - tl.load(cu_seqlens + document)
    pieces = (length + 63) // 64 * 2
    opening = tl.load(segments + 3 * count + tl.load(first_segments + document)).to(tl.int64) * 2
    of_document = document.to(tl.int64) * document_stride + column * STATE + place // channels
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document, inside, 0.0)
    for begin in range(0, pieces, GROUP):
        added, decays = (), ()
        for nth in tl.static_range(GROUP):
            piece = opening + (pieces - 1 - begin - nth if REVERSE else begin + nth)
            real = inside & (begin + nth < pieces)
            added += (tl.load(values + piece * STATE * channels + place, real, 0.0),)
            step = tl.load(steps + piece * channels + column, real, 0.0)
            decays += (tl.exp2(step * rate),)
        for nth in tl.static_range(GROUP):
            piece = opening + (pieces - 1 - begin - nth if REVERSE else begin + nth)
            real = inside & (begin + nth < pieces)
            tl.store(values + piece * STATE * channels + place, state, real)
            state = tl.fma(decays[nth], state, added[nth])  # past the last: times one, plus zero
    if final is not None:
        tl.store(final + of_document, state, inside)


@jit
def scan_kernel(
    x,
    dt,
    B,
    C,
    D,
    rates,
    dt_bias,
    ranges,
    starts,
    y,
    states,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    y_stride,
    chunks,
    channels,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write y, or if `states` is given, the state before every second group, [pieces, 4, N, channels]."""
    piece = tl.program_id(0)
    first, end = _bounds_of(ranges, chunks, piece, PIECE)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    element = tl.arange(0, BLOCK_N)
    exists, part = column < channels, element < STATE
    tile = element[:, None] * channels + column[None, :]
    inside = part[:, None] & exists[None, :]
    rate = tl.load(rates + tile, inside, 0.0) * 1.4426950408889634
    bias = tl.load(dt_bias + column, exists, 0.0).to(tl.float32)
    state = tl.load(starts + piece.to(tl.int64) * STATE * channels + tile, inside, 0.0)
    if states is None:
        residual = tl.load(D + column, exists, 0.0).to(tl.float32)
    for begin in range(first, end, GROUP):
        step_of, x_of, b_of, c_of = (), (), (), ()
        for nth in tl.static_range(GROUP):
            token = begin + nth
            real = exists & (token < end)
            step_of += (tl.where(real, _softplus(_load(dt, token, dt_stride, column, real) + bias), 0.0),)
            x_of += (_load(x, token, x_stride, column, real),)
            b_of += (_load(B, token, b_stride, element, part & (token < end)),)
            if states is None:
                c_of += (_load(C, token, c_stride, element, part & (token < end)),)
        if states is not None:
            group = (begin - first) // GROUP
            eighth = piece.to(tl.int64) * (PIECE // GROUP // 2) + group // 2
            tl.store(states + eighth * STATE * channels + tile, state, inside & (group % 2 == 0))
        for nth in tl.static_range(GROUP):
            a = tl.exp2(step_of[nth][None, :] * rate)
            state = tl.fma(a, state, b_of[nth][:, None] * (step_of[nth] * x_of[nth])[None, :])
            if states is None:
                token = begin + nth
                output = tl.fma(residual, x_of[nth], tl.sum(c_of[nth][:, None] * state, 0))
                target = y + token.to(tl.int64) * y_stride + column
                tl.store(target, output.to(y.dtype.element_ty), exists & (token < end))


@jit
def grads_kernel(
    x,
    dt,
    B,
    C,
    D,
    dy,
    rates,
    dt_bias,
    ranges,
    states,
    dends,
    dx,
    ddt,
    drates,
    sums,
    dbc,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    dy_stride,
    dx_stride,
    ddt_stride,
    chunks,
    channels,
    tokens,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write dx and ddt, and by piece or block of channels sums for the other gradients.

    drates: [pieces, N, channels]; sums: [2, pieces, channels], of D and of the bias;
    dbc: [2, blocks, T, N], of B and of C; dends: gradients at the ends of pieces, overwritten.
    """
    piece = tl.program_id(0)
    block = tl.program_id(1)
    first, end = _bounds_of(ranges, chunks, piece, PIECE)
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = column < channels
    bias = tl.load(dt_bias + column, exists, 0.0).to(tl.float32)
    residual = tl.load(D + column, exists, 0.0).to(tl.float32)
    of_piece = piece.to(tl.int64) * STATE * channels + column
    for n in range(STATE):
        tl.store(drates + of_piece + n * channels, tl.zeros([BLOCK_D], tl.float32), exists)
    dresidual = tl.zeros([BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    tiles = tl.cdiv(tl.maximum(end - first, 0), TILE)
    for back in range(0, tiles):
        nth_tile = tiles - 1 - back
        begin = first + nth_tile * TILE
        of_tile = (piece.to(tl.int64) * (PIECE // TILE) + nth_tile) * STATE * channels + column
        step_of, write_of, dy_of, dwrite_of, dstep_of = (), (), (), (), ()
        for nth in tl.static_range(TILE):
            token = begin + nth
            real = exists & (token < end)
            step = tl.where(real, _softplus(_load(dt, token, dt_stride, column, real) + bias), 0.0)
            step_of += (step,)
            write_of += (step * _load(x, token, x_stride, column, real),)
            dy_of += (_load(dy, token, dy_stride, column, real),)
            dwrite_of += (tl.zeros([BLOCK_D], tl.float32),)
            dstep_of += (tl.zeros([BLOCK_D], tl.float32),)
        rows_of_b, rows_of_c = B + begin.to(tl.int64) * b_stride, C + begin.to(tl.int64) * c_stride
        rows_of_db = dbc + (block.to(tl.int64) * tokens + begin) * STATE
        rows_of_dc = rows_of_db + tl.num_programs(1).to(tl.int64) * tokens * STATE
        for n in range(STATE):
            rate = tl.load(rates + n * channels + column, exists, 0.0)
            state = tl.load(states + of_tile + n * channels, exists, 0.0)
            gradient = tl.load(dends + of_piece + n * channels, exists, 0.0)
            drate = tl.load(drates + of_piece + n * channels, exists, 0.0)
            decay_of, state_of, b_of = (), (state,), ()
            for nth in tl.static_range(TILE):
                b = tl.load(rows_of_b + nth * b_stride + n, begin + nth < end, 0.0).to(tl.float32)
                a = tl.exp2(step_of[nth] * (rate * 1.4426950408889634))
                state = tl.fma(a, state, b * write_of[nth])
                decay_of += (a,)
                state_of += (state,)
                b_of += (b,)
            more, slower = (), ()  # from the last token to the first
            for nth in tl.static_range(TILE):
                there = begin + (TILE - 1 - nth) < end
                c = tl.load(rows_of_c + (TILE - 1 - nth) * c_stride + n, there, 0.0).to(tl.float32)
                gradient = tl.fma(dy_of[TILE - 1 - nth], c, gradient)
                db = tl.sum(gradient * write_of[TILE - 1 - nth], 0)
                dc = tl.sum(dy_of[TILE - 1 - nth] * state_of[TILE - nth], 0)
                tl.store(rows_of_db + (TILE - 1 - nth) * STATE + n, db, there)
                tl.store(rows_of_dc + (TILE - 1 - nth) * STATE + n, dc, there)
                more += (tl.fma(gradient, b_of[TILE - 1 - nth], dwrite_of[TILE - 1 - nth]),)
                gradient *= decay_of[TILE - 1 - nth]
                through = gradient * state_of[TILE - 1 - nth]
                slower += (tl.fma(through, rate, dstep_of[TILE - 1 - nth]),)
                drate = tl.fma(through, step_of[TILE - 1 - nth], drate)
            dwrite_of, dstep_of = (), ()
            for nth in tl.static_range(TILE):
                dwrite_of += (more[TILE - 1 - nth],)
                dstep_of += (slower[TILE - 1 - nth],)
            tl.store(dends + of_piece + n * channels, gradient, exists)
            tl.store(drates + of_piece + n * channels, drate, exists)
        for nth in tl.static_range(TILE):
            token = begin + nth
            real = exists & (token < end)
            value = _load(x, token, x_stride, column, real)
            raw = _load(dt, token, dt_stride, column, real) + bias
            dstep = tl.fma(value, dwrite_of[nth], dstep_of[nth])
            draw = tl.where(real, dstep * tl.sigmoid(raw), 0.0)
            dvalue = tl.fma(residual, dy_of[nth], step_of[nth] * dwrite_of[nth])
            dresidual = tl.fma(dy_of[nth], value, dresidual)
            dbias += draw
            target = dx + token.to(tl.int64) * dx_stride + column
            tl.store(target, dvalue.to(dx.dtype.element_ty), real)
            target = ddt + token.to(tl.int64) * ddt_stride + column
            tl.store(target, draw.to(ddt.dtype.element_ty), real)
    target = sums + piece.to(tl.int64) * channels + column
    tl.store(target, dresidual, exists)
    tl.store(target + tl.num_programs(0).to(tl.int64) * channels, dbias, exists)
