"""State space duality, the scan of Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060).

For every head, with a state S [head_dim, N] that starts at zero in each document:

    d_t = clamp(softplus(dt_t + dt_bias), *dt_limit)
    S   <- exp(-exp(A_log) d_t) S + d_t x_t B_t^T
    y_t = S C_t + D x_t

A group of B and C serves as many heads in a row as there are heads per group. Everything is computed in
float32 but for the operands of the kernels' matrix products, which are rounded to x's dtype.

All tokens but those of decoding run in chunks of 64 (section 6 of the paper; `_ssd_chunks.py` has the kernels
and their formulas). Documents never share a chunk. With g_t = -exp(A_log) d_t and G its cumulative sum within
a chunk that starts from the state S_0:

    y_i = sum over j <= i of exp(G_i - G_j) (C_i . B_j) d_j x_j + exp(G_i) S_0 C_i + D x_i

Only the operands are kept for the backward pass, which computes the states again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable
from liger_models.kernels.recurrent._chunk_table import CHUNK, ChunkTables, chunk_table, use_chunks
from liger_models.kernels.recurrent.state_spaces._ssd_chunks import SSD, WIDEST

NO_LIMIT = (0.0, None)
Limit = tuple[float, float | None]


def ssd(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    dt_limit: Limit = NO_LIMIT,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    tables: ChunkTables | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan of Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060) over packed documents.

    Args:
        x: [T, heads, head_dim], float dtype.
        dt: [T, heads], the step before bias and softplus.
        B, C: [T, groups, N] in x's dtype; heads is a multiple of groups.
        A_log, D, dt_bias: [heads].
        dt_limit: bounds of the step after softplus; None for no upper one.
        cu_seqlens: [documents + 1] integers that rise from 0 to T; None for one document.
        state: [documents, heads, head_dim, N] float32, initial states; None for zeros.
        tables: of the same documents, to find their chunks once for several calls; None: they are found here.

    Returns:
        y [T, heads, head_dim] in x's dtype, and the final state of every document, as `state`; float64 for
        float64 operands. Gradients flow through both, except to `dt_limit`. Running it again gives the same
        bits.

        On a GPU, heads or states wider than 256, and in float32 wider than 64, run the plain form, which is
        slow.

    Raises:
        ValueError: shapes or dtypes that do not fit, or tensors on several devices.
    """
    _check(x, dt, B, C, (A_log, D, dt_bias), cu_seqlens, state)
    if max(x.shape[2], B.shape[2]) <= WIDEST and use_chunks(x, B, dt, C, A_log, D, dt_bias, state):
        table = chunk_table(cu_seqlens, x.shape[0], x.device, x.shape[1], tables)
        return SSD.apply(x, dt, B, C, A_log, D, dt_bias, state, table, dt_limit)
    return _PlainSSD.apply(x, dt, B, C, A_log, D, dt_bias, state, cu_seqlens, dt_limit)


def ssd_plain(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_limit: Limit,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `ssd`, in chunks."""
    heads, per_group = x.shape[1], x.shape[1] // B.shape[1]
    wide, step = at_least_float32(x), _step(dt, dt_bias, dt_limit)
    decay = -at_least_float32(A_log).exp() * step
    if state is None:
        documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        state = wide.new_zeros(documents, heads, x.shape[2], B.shape[2])
    state = at_least_float32(state)
    if not len(x) or not len(state):
        return x.clone(), state.clone()
    tokens, exists, document, last = _chunks(cu_seqlens, len(x), x.device)

    def chunked(values: Tensor) -> Tensor:
        return torch.where(exists.view(*exists.shape, *[1] * (values.dim() - 1)), values[tokens], 0)

    def of_heads(values: Tensor) -> Tensor:  # [chunks, heads, 64, N]
        return chunked(at_least_float32(values)).transpose(1, 2).repeat_interleave(per_group, 1)

    written = chunked(wide * step[..., None]).transpose(1, 2)  # [chunks, heads, 64, head_dim]
    b, c = of_heads(B), of_heads(C)
    total = chunked(decay).transpose(1, 2).cumsum(-1)  # G: [chunks, heads, 64]
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    within = (c @ b.transpose(-1, -2) * between) @ written
    added = (written * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2) @ b
    starts, final = _pass_states(added, total[..., -1].exp(), state, document, last)
    carried = (c * total.exp()[..., None]) @ starts.transpose(-1, -2)
    y = (within + carried).transpose(1, 2)[exists]  # chunks in the order of tokens
    return (y + at_least_float32(D)[:, None] * wide).to(x.dtype), final


def ssd_step(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    dt_limit: Limit = NO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """One further token of every sequence, for decoding.

    Args:
        x, dt, B, C: as in `ssd`, with sequences in place of tokens.
        A_log, D, dt_bias, dt_limit: as there.
        state: [sequences, heads, head_dim, N] float32.

    Returns:
        y [sequences, heads, head_dim] in x's dtype, and the new state, a new tensor.
    """
    wide, step = at_least_float32(x), _step(dt, dt_bias, dt_limit)
    decay = torch.exp(-at_least_float32(A_log).exp() * step)
    b, c = (at_least_float32(v).repeat_interleave(x.shape[1] // B.shape[1], 1)[:, :, None] for v in (B, C))
    state = state * decay[..., None, None] + (wide * step[..., None])[..., None] * b
    y = (state * c).sum(-1) + at_least_float32(D)[:, None] * wide
    return y.to(x.dtype), state


class _PlainSSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.dt_limit = operands
        ctx.save_for_backward(*tensors)
        return ssd_plain(*operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        with torch.enable_grad():
            own: list[Any] = [
                None if tensor is None else tensor.detach().requires_grad_(needed)
                for tensor, needed in zip(tensors, ctx.needs_input_grad[:8], strict=True)
            ]
            operands: list[Any] = [*own, cu_seqlens, ctx.dt_limit]
            results = ssd_plain(*operands)
        wanted = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
        given = [(y, dy) for y, dy in zip(results, (dy, dfinal), strict=True) if y.requires_grad]
        outputs, gradients = zip(*given, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:8]), None, None


def _step(dt: Tensor, dt_bias: Tensor, dt_limit: Limit) -> Tensor:
    """The step of every token and head: [T, heads]."""
    return F.softplus(at_least_float32(dt) + at_least_float32(dt_bias)).clamp(*dt_limit)


def _chunks(
    cu_seqlens: Tensor | None, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The chunks of documents, found without waiting for the device; there may be empty ones at the end.

    Returns:
        The tokens of every chunk, [chunks, 64]; which of these exist; the document that begins with a chunk,
        or -1, [chunks]; and the number of every document's last chunk, or -1 for an empty one, [documents].
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(2, device=device) * tokens
    bounds = cu_seqlens.long()
    documents = len(bounds) - 1
    counts = (bounds.diff() + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    chunk = torch.arange(tokens // CHUNK + documents, device=device)
    document = torch.searchsorted(ends, chunk, right=True).clamp(max=documents - 1)
    nth = chunk - (ends - counts)[document]
    first = bounds[document] + nth * CHUNK
    token = first[:, None] + torch.arange(CHUNK, device=device)
    exists = (token < bounds[document + 1][:, None]) & (chunk < ends[-1])[:, None]
    begins = torch.where((nth == 0) & (chunk < ends[-1]), document, -1)
    return token.clamp(max=tokens - 1), exists, begins, torch.where(counts > 0, ends - 1, -1)


def _pass_states(
    added: Tensor, decay: Tensor, initial: Tensor, document: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state at the start of every chunk, and after every document."""
    begins = (document >= 0)[:, None, None, None]
    fresh = initial[document.clamp(min=0)]
    starts, ends = [], []
    state = initial[0]
    for chunk in range(len(added)):
        starts.append(torch.where(begins[chunk], fresh[chunk], state))
        state = decay[chunk][:, None, None] * starts[-1] + added[chunk]
        ends.append(state)
    final = torch.stack(ends)[last.clamp(min=0)]
    return torch.stack(starts), torch.where((last >= 0)[:, None, None, None], final, initial)


def _check(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    of_heads: tuple[Tensor, ...],
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    if x.dim() != 3 or dt.shape != x.shape[:2]:
        found = f"x is {tuple(x.shape)}, dt {tuple(dt.shape)}"
        raise ValueError(f"{found}; expected [T, heads, head_dim] and [T, heads]")
    if B.dim() != 3 or C.shape != B.shape or len(B) != len(x):
        found = f"B is {tuple(B.shape)}, C {tuple(C.shape)}"
        raise ValueError(f"{found}; expected [T, groups, N] twice, with {len(x)} tokens")
    if not x.dtype == B.dtype == C.dtype:
        raise ValueError(f"x is {x.dtype}, B {B.dtype}, C {C.dtype}; expected one dtype")
    if x.shape[1] % B.shape[1]:
        raise ValueError(f"there are {x.shape[1]} heads for {B.shape[1]} groups; expected a multiple")
    if any(tensor.shape != x.shape[1:2] for tensor in of_heads):
        found = ", ".join(str(tuple(tensor.shape)) for tensor in of_heads)
        raise ValueError(f"A_log, D and dt_bias are {found}; expected ({x.shape[1]},)")
    if state is not None:
        documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        expected = documents, *x.shape[1:], B.shape[2]
        if state.shape != expected:
            raise ValueError(f"state is {tuple(state.shape)}; expected {expected}")
