"""Real-gated linear recurrent unit, RG-LRU (De et al., 2024, arXiv:2402.19427, section 2.4).

For every channel, with a state h that starts at zero in each document:

    i_t = sigmoid(gates_t,0 + bias_0),    r_t = sigmoid(gates_t,1 + bias_1)
    a_t = exp(-8 softplus(decay) r_t),    m_t = sqrt(1 - a_t^2)
    h_t = a_t h_{t-1} + m_t i_t x_t

At the first token of a document a = 0 and m = 1. Everything is computed in float32.

Gradients, with g_t the gradient of h_t, s = 8 softplus(decay) and l_t = log a_t:

    g_t  = dh_t + a_{t+1} g_{t+1}                         within the document
    dx_t = g_t m_t i_t,    di_t = g_t m_t x_t,    dm_t = g_t i_t x_t
    dl_t = g_t a_t h_{t-1} - dm_t a_t^2 / max(m_t, 1/2000)
    dr_t = -s dl_t,        ds   = - sum over t of r_t dl_t

The bound of 1/2000 is that of the reference, whose derivative of a square root is at most 1000: a channel
that forgets nothing would otherwise divide by zero.

Operands are kept for the backward pass, and the states of every 32 tokens (`_rg_lru_pieces.py`).

Bytes moved at the least, for T tokens and C channels of b bytes: forward 4 T C b, backward 7 T C b. The
kernels move 7 T C b and 9 T C b, since pieces of a document run in parallel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable, use_triton
from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.kernels.recurrent._chunk_table import ChunkTables, chunk_table
from liger_models.kernels.recurrent._prefix import Bounds, prefix
from liger_models.kernels.recurrent._rg_lru_pieces import run, run_grads

SHARPNESS = 8.0  # of the decay: "c" in the paper
LEAST_ROOT = 1 / 2000  # in the derivative of the square root


def rg_lru(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    tables: ChunkTables | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan of the RG-LRU (De et al., 2024, arXiv:2402.19427, section 2.4) over packed documents.

    Args:
        x: [T, heads, width], float dtype.
        gates: [T, heads, 2, width], the input gate and the recurrence gate before bias and sigmoid.
        bias: [heads, 2, width], of the gates.
        decay: [heads * width]; its softplus times eight is the fastest rate of decay of a channel.
        cu_seqlens: [documents + 1] integers that rise from 0 to T; None for one document.
        state: [documents, heads * width + 1] float32, what the documents continue: the state of every
            channel, and 1; or 0 for a document without tokens so far, which begins here. None if all begin.
        tables: of the same documents, to find their chunks once for several calls; None: they are found here.

    Returns:
        h [T, heads, width] in x's dtype, and the final state of every document, as `state`; float64 for
        float64 operands. Gradients flow through both. Running it again gives the same bits.

    Raises:
        ValueError: shapes that do not fit, or tensors on several devices.
        TypeError: x is not floating point.
    """
    _check(x, gates, bias, decay, cu_seqlens, state)
    return _RGLRU.apply(x, gates, bias, decay, state, cu_seqlens, tables)


def rg_lru_plain(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `rg_lru`."""
    if is_batch_invariant() and cu_seqlens is not None:  # blocks of the sums would span documents
        lengths = cu_seqlens.diff().tolist()
        rows = [operand.split(lengths) for operand in (x, gates)]
        states = [None] * len(lengths) if state is None else state.split(1)
        alone = [
            rg_lru_plain(own, its, bias, decay, first) for own, its, first in zip(*rows, states, strict=True)
        ]
        return torch.cat([h for h, _ in alone]), torch.cat([last for _, last in alone])
    bounds = Bounds.of(cu_seqlens, x)
    initial, begun = _initial(x, state, len(bounds.first))
    parts = _Factors.of(x, gates, bias, decay, _opening(bounds, begun))
    h = _states(parts, bounds, initial)
    begun = torch.maximum(begun, (bounds.first < len(x)).to(begun)[:, None])
    return h.view(x.shape).to(x.dtype), torch.cat([bounds.at_ends(h, initial), begun], 1)


def rg_lru_step(
    x: Tensor, gates: Tensor, bias: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Process one further token of every sequence, for decoding.

    Args:
        x, gates: as in `rg_lru`, with sequences in place of tokens.
        bias, decay: as there.
        state: [sequences, heads * width + 1] float32.

    Returns:
        h [sequences, heads, width] in x's dtype, and the new state, a new tensor.
    """
    before, begun = state[:, :-1], state[:, -1:]
    parts = _Factors.of(x, gates, bias, decay, begun == 0)
    h = parts.a * before + parts.written
    return h.view(x.shape).to(x.dtype), torch.cat([h, torch.ones_like(begun)], 1)


class _RGLRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        *own, tables = operands
        *tensors, cu_seqlens = own
        ctx.table = starts = None
        if use_triton(*tensors):
            ctx.table = chunk_table(cu_seqlens, len(tensors[0]), tensors[0].device, 1, tables)
            with_table: list[Any] = [*tensors, ctx.table]
            h, final, starts = run(*with_table)
        else:
            h, final = rg_lru_plain(*own)
        ctx.save_for_backward(*own, starts)
        return h, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens, starts = ctx.saved_tensors
        compute: Any = _plain_grads if ctx.table is None else run_grads
        places = (cu_seqlens,) if ctx.table is None else (ctx.table, starts)
        found = compute(*tensors, *places, dh, dfinal)
        given = zip(found, tensors, strict=True)
        return *(None if one is None else gradient.to(one.dtype) for gradient, one in given), None, None


def _plain_grads(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dh: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of x, gates, bias, decay and state, in float32 or float64."""
    bounds = Bounds.of(cu_seqlens, x)
    initial, begun = _initial(x, state, len(bounds.first))
    opens = _opening(bounds, begun)
    parts = _Factors.of(x, gates, bias, decay, opens)
    dfinal = dfinal[:, :-1].to(parts.x.dtype)
    before = F.pad(_states(parts, bounds, initial), (0, 0, 1, 0))[:-1]
    before = before.masked_fill(bounds.begins[:, None], 0) + bounds.to_starts(initial, len(x))
    following = F.pad(parts.a.masked_fill(bounds.begins[:, None], 0), (0, 0, 0, 1))[1:]
    given = at_least_float32(dh).flatten(1) + bounds.to_ends(dfinal, len(x))
    g = prefix(following.flip(0)[..., None], given.flip(0)[..., None])[..., 0].flip(0)
    droot = (g * parts.i * parts.x).masked_fill(opens, 0)
    dlog = g * parts.a * before - droot * parts.a.square() / parts.root.clamp(min=LEAST_ROOT)
    rate = _rate(decay)
    dgates = torch.stack(
        [
            (g * parts.root * parts.x * parts.i * (1 - parts.i)).view(x.shape),
            (-rate * dlog * parts.r * (1 - parts.r)).view(x.shape),
        ],
        dim=2,
    )
    ddecay = -SHARPNESS * torch.sigmoid(at_least_float32(decay)) * (dlog * parts.r).sum(0)
    dx = (g * parts.root * parts.i).view(x.shape)
    dstate = F.pad(bounds.at_starts(parts.a * g, dfinal), (0, 1))
    return dx, dgates, dgates.sum(0), ddecay, dstate


class _Factors(NamedTuple):
    """h_t = a_t h_{t-1} + root_t i_t x_t: all [T, channels], in float32 or float64."""

    x: Tensor
    i: Tensor
    r: Tensor
    a: Tensor
    root: Tensor

    @staticmethod
    def of(x: Tensor, gates: Tensor, bias: Tensor, decay: Tensor, opens: Tensor) -> _Factors:
        """opens: [T, 1], tokens with which a document begins."""
        i, r = (at_least_float32(gates) + at_least_float32(bias)).sigmoid().unbind(2)
        log = -r.flatten(1) * _rate(decay)
        root = (-torch.expm1(2 * log)).sqrt()
        a, root = log.exp().masked_fill(opens, 0), root.masked_fill(opens, 1)
        return _Factors(at_least_float32(x).flatten(1), i.flatten(1), r.flatten(1), a, root)

    @property
    def written(self) -> Tensor:
        return self.root * self.i * self.x


def _states(parts: _Factors, bounds: Bounds, initial: Tensor) -> Tensor:
    kept = parts.a.masked_fill(bounds.begins[:, None], 0)
    added = parts.written + parts.a * bounds.to_starts(initial, len(parts.a))
    return prefix(kept[..., None], added[..., None])[..., 0]


def _initial(x: Tensor, state: Tensor | None, documents: int) -> tuple[Tensor, Tensor]:
    """States [documents, channels] before the documents, and [documents, 1], 0 for those that begin."""
    like = at_least_float32(x[:0])
    if state is None:
        return like.new_zeros(documents, x.shape[1] * x.shape[2]), like.new_zeros(documents, 1)
    return state[:, :-1].to(like.dtype), state[:, -1:].to(like.dtype)


def _opening(bounds: Bounds, begun: Tensor) -> Tensor:
    """[T, 1] bool, the first tokens of documents that begin."""
    return bounds.to_starts((begun == 0).to(torch.int32), len(bounds.begins)) > 0


def _rate(decay: Tensor) -> Tensor:
    return SHARPNESS * F.softplus(at_least_float32(decay))


def _check(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    if not x.is_floating_point():
        raise TypeError(f"expected a floating point tensor, found {x.dtype}")
    if x.dim() != 3:
        raise ValueError(f"x is {tuple(x.shape)}; expected [T, heads, width]")
    tokens, heads, width = x.shape
    if gates.shape != (tokens, heads, 2, width):
        raise ValueError(f"gates are {tuple(gates.shape)}; expected {(tokens, heads, 2, width)}")
    if bias.shape != gates.shape[1:] or decay.shape != (heads * width,):
        found = f"bias is {tuple(bias.shape)}, decay {tuple(decay.shape)}"
        raise ValueError(f"{found}; expected {(heads, 2, width)} and {(heads * width,)}")
    documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    if state is not None and state.shape != (documents, heads * width + 1):
        raise ValueError(f"state is {tuple(state.shape)}; expected {(documents, heads * width + 1)}")
