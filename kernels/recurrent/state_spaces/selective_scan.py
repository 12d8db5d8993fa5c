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

Only the operands are kept for the backward pass, which computes the states again; `_selective_pieces.py` has
the kernels. The state never exists for all tokens at once.

Bytes moved at the least, for T tokens and d channels of b bytes: forward 3 T d b, backward 5 T d b. The
exponentials take longer: T d N of them, twice in the forward pass and three times in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable, use_triton
from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.kernels.recurrent._chunk_table import ChunkTables, chunk_table
from liger_models.kernels.recurrent._prefix import Bounds, prefix
from liger_models.kernels.recurrent.state_spaces._selective_pieces import run, run_grads

WIDEST_STATE = 256


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
    tables: ChunkTables | None = None,
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
        tables: of the same documents, to find their chunks once for several calls; None: they are found here.

    Returns:
        y [T, d] in x's dtype, and the final state of every document, as `state`; float64 for float64
        operands. Gradients flow through both. Running it again gives the same bits.

    Raises:
        ValueError: shapes that do not fit, or tensors on several devices.
        TypeError: x is not floating point.
    """
    _check(x, dt, A_log, B, C, (D, dt_bias), cu_seqlens, state)
    return _SelectiveScan.apply(x, dt, A_log, B, C, D, dt_bias, state, cu_seqlens, tables)


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
    if is_batch_invariant() and cu_seqlens is not None:  # blocks of the sums would span documents
        lengths = cu_seqlens.diff().tolist()
        rows = [operand.split(lengths) for operand in (x, dt, B, C)]
        states = [None] * len(lengths) if state is None else state.split(1)
        alone = [
            selective_scan_plain(own, step, A_log, b, c, D, dt_bias, first)
            for own, step, b, c, first in zip(*rows, states, strict=True)
        ]
        return torch.cat([y for y, _ in alone]), torch.cat([last for _, last in alone])
    bounds = Bounds.of(cu_seqlens, x)
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
        *own, tables = operands
        *tensors, cu_seqlens = own
        ctx.save_for_backward(*own)
        ctx.table = None
        if use_triton(*tensors):
            ctx.table = chunk_table(cu_seqlens, len(tensors[0]), tensors[0].device, 1, tables)
            with_table: list[Any] = [*tensors, ctx.table]
            return run(*with_table)
        return selective_scan_plain(*own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        compute: Any = _plain_grads if ctx.table is None else run_grads
        found = compute(*tensors, cu_seqlens if ctx.table is None else ctx.table, dy, dfinal)
        return (
            *(
                None if given is None else gradient.to(given.dtype)
                for gradient, given in zip(found, tensors, strict=True)
            ),
            None,
            None,
        )


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
    bounds = Bounds.of(cu_seqlens, x)
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


class _Recurrence(NamedTuple):
    """h_t = decay_t h_{t-1} + written_t for some channels, in float32 or float64."""

    bounds: Bounds
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
        bounds: Bounds,
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
        return prefix(kept, self.written + self.decay * self._from_initial())

    def before(self, h: Tensor) -> Tensor:
        """The state before each token."""
        shifted = F.pad(h, (0, 0, 0, 0, 1, 0))[: len(h)]
        return shifted.masked_fill(self.bounds.begins[:, None, None], 0) + self._from_initial()

    def gradients(self, dh: Tensor, dfinal: Tensor) -> Tensor:
        """g, from the gradient of h by the outputs and that of the final states."""
        kept = self.decay.masked_fill(self.bounds.begins[:, None, None], 0)
        following = F.pad(kept, (0, 0, 0, 0, 0, 1))[1:]
        given = dh + self.bounds.to_ends(dfinal.to(dh.dtype), len(dh))
        return prefix(following.flip(0), given.flip(0)).flip(0)

    def _from_initial(self) -> Tensor:
        return self.bounds.to_starts(self.initial, len(self.decay))


def _slabs(x: Tensor, states: int) -> Iterator[slice]:
    """Number of channels that limits the states of all tokens to about two million elements at a time."""
    size = max(1, (1 << 21) // max(1, len(x) * states))
    for begin in range(0, x.shape[1], size):
        yield slice(begin, begin + size)


def _step(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """d: [T, channels]."""
    return F.softplus(at_least_float32(dt) + at_least_float32(dt_bias))


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
