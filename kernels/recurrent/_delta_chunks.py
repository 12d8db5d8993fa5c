"""Kernels of the gated delta rule on chunks of C = 64 tokens.

In a chunk, with the state S at its start, G the running sum of g, and rows i, j of its tokens:

    A[i, j] = beta_i exp(G_i - G_j) k_i . k_j   for i > j, else 0
    T       = (1 + A)^-1
    R       = beta (V - exp(G) K S)                      what the tokens would write if they were alone
    N       = T R                                        what they write
    P[i, j] = exp(G_i - G_j) q_i . k_j          for i >= j, else 0
    O       = exp(G) Q S + P N
    S'      = exp(G_C) S + (exp(G_C - G) K)^T N

and backward, with dS' given by the chunk behind:

    dN = P^T dO + exp(G_C - G) K dS'
    dR = T^T dN,   dV = beta dR,   dA = -dR N^T          (T^T dN N^T needs no product with T: N = T R)
    dS = exp(G_C) dS' + (exp(G) Q)^T dO - (beta exp(G) K)^T dR

Five kernels, none of which waits for another chunk but the two that pass the state on:

    prepare        T, G, beta and the inverse lengths of q and k, by chunk and value head
    states         S and N, in order over the chunks of a document; O with them in the forward pass
    state_grads    dS' and dR, in reverse order
    operand_grads  dq, dk, dv, dg and dbeta, by chunk and key head

q and k are read as they are: their products are scaled by the inverse lengths, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
)

CHUNK = 64


class ChunkTable(NamedTuple):
    """Where the chunks of packed documents are.

    Attributes:
        cu_seqlens: [documents + 1] int32.
        first_chunks: [documents] int32, the number of each document's first chunk.
        ranges: [2, at most so many chunks] int32, the first token of every chunk and the end of its
            document; both 0 for chunks that do not exist.
    """

    cu_seqlens: Tensor
    first_chunks: Tensor
    ranges: Tensor


def chunk_table(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> ChunkTable:
    """The chunks of documents, found without waiting for the device."""
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, tokens], device=device)
    bounds = cu_seqlens.to(torch.int32)
    counts = (bounds.diff() + (CHUNK - 1)) // CHUNK
    ends = counts.cumsum(0, dtype=torch.int32)
    first_chunks = ends - counts
    most = tokens // CHUNK + len(counts)
    chunk = torch.arange(most, dtype=torch.int32, device=device)
    document = torch.bucketize(chunk, ends, right=True)
    exists = document < len(counts)
    document = document.clamp(max=len(counts) - 1)
    first = bounds[document] + (chunk - first_chunks[document]) * CHUNK
    ranges = torch.stack([first, bounds[document + 1]]) * exists
    return ChunkTable(bounds, first_chunks, ranges.contiguous())


class _Prepared(NamedTuple):
    transfer: Tensor  # T: [chunks, heads, C, C] in q's dtype
    cumulative: Tensor  # G: [tokens, heads]
    beta: Tensor  # [tokens, heads]
    q_scale: Tensor  # [tokens, key_heads], inverse lengths, with dk^-1/2
    k_scale: Tensor  # [tokens, key_heads]


class GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, a, b, A_log, dt_bias, state, table, beta_scale, l2_eps):
        q, k, v = (_with_whole_heads(x) for x in (q, k, v))
        state = None if state is None else state.float().contiguous()
        ctx.save_for_backward(q, k, v, a, b, A_log, dt_bias, state)
        ctx.table, ctx.beta_scale, ctx.l2_eps = table, beta_scale, l2_eps
        ctx.set_materialize_grads(False)
        with on_device_of(q):
            prepared = _prepare(q, k, a, b, A_log, dt_bias, table, beta_scale, l2_eps)
            o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            final = _run_states(q, k, v, prepared, table, state, output=o)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        q, k, v, a, b, A_log, dt_bias, state = ctx.saved_tensors
        table = ctx.table
        heads, dv_size = v.shape[1:]
        do = torch.zeros_like(v) if do is None else _with_whole_heads(do)
        with on_device_of(q):
            prepared = _prepare(q, k, a, b, A_log, dt_bias, table, ctx.beta_scale, ctx.l2_eps)
            shape = table.ranges.shape[1], heads, q.shape[2], dv_size
            states, dstates = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
            new = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            _run_states(q, k, v, prepared, table, state, states=states, new=new)
            dresidual = torch.empty_like(new)
            dstate = _run_state_grads(q, k, do, prepared, table, dfinal, dstates, dresidual, state)
            dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
            dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            dg, dbeta = (torch.empty_like(prepared.beta) for _ in range(2))
            _run_operand_grads(
                q, k, v, do, prepared, table, states, dstates, new, dresidual, dq, dk, dv, dg, dbeta
            )
        # The gates' own gradients: tensors of one number a token and head.
        shifted = a.float() + dt_bias.float()
        rate = -A_log.float().exp()
        da = dg * rate * torch.sigmoid(shifted)
        dA_log = (dg * rate * F.softplus(shifted)).sum(0)
        slope = torch.sigmoid(b.float())
        db = dbeta * (ctx.beta_scale * slope * (1 - slope))
        return (
            dq,
            dk,
            dv,
            da.to(a.dtype),
            db.to(b.dtype),
            dA_log.to(A_log.dtype),
            da.sum(0).to(dt_bias.dtype),
            dstate,
            None,
            None,
            None,
        )


def _with_whole_heads(x: Tensor) -> Tensor:
    """[T, heads, D] whose heads are contiguous and next to one another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _sizes(q: Tensor, v: Tensor) -> dict[str, int | str]:
    return {
        "HEADS": v.shape[1],
        "KEY_HEADS": q.shape[1],
        "DK": q.shape[2],
        "DV": v.shape[2],
        "BLOCK_K": max(16, next_power_of_2(q.shape[2])),
        "PRECISION": _precision(q.dtype),
    }


def _precision(dtype: torch.dtype) -> str:
    """How products of this dtype are computed: float32 as three of TF32, to within a rounding or two."""
    if dtype != torch.float32:
        return "tf32"  # which says nothing of 16 bits
    return "ieee" if torch.version.hip else "tf32x3"


def _block_v(v: Tensor, most: int) -> int:
    return min(most, max(16, next_power_of_2(v.shape[2])))


def _prepare(q, k, a, b, A_log, dt_bias, table, beta_scale, l2_eps) -> _Prepared:
    (tokens, key_heads, dk), heads = q.shape, a.shape[1]
    chunks = table.ranges.shape[1]
    numbers = {"dtype": torch.float32, "device": q.device}
    prepared = _Prepared(
        torch.empty(chunks, heads, CHUNK, CHUNK, dtype=q.dtype, device=q.device),
        torch.empty(tokens, heads, **numbers),
        torch.empty(tokens, heads, **numbers),
        torch.empty(tokens, key_heads, **numbers),
        torch.empty(tokens, key_heads, **numbers),
    )
    if tokens:
        _prepare_kernel[(chunks, heads)](
            q,
            k,
            a,
            b,
            A_log,
            dt_bias,
            *prepared,
            table.ranges,
            q.stride(0),
            k.stride(0),
            *a.stride(),
            *b.stride(),
            chunks,
            beta_scale,
            l2_eps,
            dk**-0.5,
            HEADS=heads,
            KEY_HEADS=key_heads,
            DK=dk,
            BLOCK_K=max(16, next_power_of_2(dk)),
            PRECISION=_precision(q.dtype),
            SOLVE_PRECISION="tf32" if q.dtype != torch.float32 else _precision(q.dtype),
            num_warps=4,
        )
    return prepared


def _run_states(q, k, v, prepared, table, state, output=None, states=None, new=None) -> Tensor:
    """Pass states over the chunks and return the final ones; write O, or S and N, where asked."""
    documents, heads = len(table.first_chunks), v.shape[1]
    final = torch.empty(documents, heads, q.shape[2], v.shape[2], dtype=torch.float32, device=q.device)
    block = _block_v(v, 64)
    if documents:
        _states_kernel[(ceil_div(v.shape[2], block), heads, documents)](
            q,
            k,
            v,
            *prepared,
            table.cu_seqlens,
            table.first_chunks,
            state,
            output,
            states,
            new,
            final,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            **_sizes(q, v),
            BLOCK_V=block,
            num_warps=4,
            num_stages=1,
        )
    return final


def _run_state_grads(q, k, do, prepared, table, dfinal, dstates, dresidual, state) -> Tensor | None:
    """Pass the states' gradients back. Write dS' to `dstates` and dR to `dresidual`; returns dstate."""
    documents, heads = len(table.first_chunks), do.shape[1]
    dstate = None if state is None else torch.empty_like(state)
    block = _block_v(do, 64)
    if documents:
        _state_grads_kernel[(ceil_div(do.shape[2], block), heads, documents)](
            q,
            k,
            do,
            *prepared,
            table.cu_seqlens,
            table.first_chunks,
            None if dfinal is None else dfinal.float().contiguous(),
            dstates,
            dresidual,
            dstate,
            q.stride(0),
            k.stride(0),
            do.stride(0),
            **_sizes(q, do),
            BLOCK_V=block,
            num_warps=4,
            num_stages=1,
        )
    return dstate


def _run_operand_grads(
    q, k, v, do, prepared, table, states, dstates, new, dresidual, dq, dk, dv, dg, dbeta
) -> None:
    if not len(q):
        return
    chunks = table.ranges.shape[1]
    block = _block_v(v, 32 if q.dtype == torch.float32 else 64)
    _query_grads_kernel[(chunks, q.shape[1])](
        q,
        k,
        do,
        prepared.cumulative,
        prepared.q_scale,
        prepared.k_scale,
        table.ranges,
        states,
        new,
        dq,
        dg,
        q.stride(0),
        k.stride(0),
        do.stride(0),
        chunks,
        q.shape[2] ** -0.5,
        **_sizes(q, v),
        BLOCK_V=block,
        num_warps=8,
        num_stages=1,
    )
    _key_grads_kernel[(chunks, q.shape[1])](
        q,
        k,
        v,
        do,
        *prepared[1:],
        table.ranges,
        states,
        dstates,
        new,
        dresidual,
        dk,
        dv,
        dg,
        dbeta,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        do.stride(0),
        chunks,
        **_sizes(q, v),
        BLOCK_V=block,
        num_warps=8,
        num_stages=1,
    )


@jit
def _numbers_of(numbers, start, count, head, HEADS: tl.constexpr):
    """One number of each of a chunk's tokens: [C], zero behind the first `count`."""
    row = tl.arange(0, 64)
    return tl.load(numbers + start.to(tl.int64) * HEADS + head + row * HEADS, row < count, 0.0)


@jit
def _store_numbers(numbers, values, start, count, head, HEADS: tl.constexpr):
    row = tl.arange(0, 64)
    tl.store(numbers + start.to(tl.int64) * HEADS + head + row * HEADS, values, row < count)


@jit
def _places(stride, start, count, head, column, D: tl.constexpr):
    """Where a chunk's rows of one head begin, their offsets [C, columns] from there, and which exist."""
    row = tl.arange(0, 64)
    # 64 bits for the beginning alone: offsets of a tile take registers.
    offsets = row[:, None] * stride + column[None, :]
    return start.to(tl.int64) * stride + head * D, offsets, (row < count)[:, None] & (column < D)[None, :]


@jit
def _rows_of(x, stride, start, count, head, column, D: tl.constexpr):
    """A chunk's rows of one head: [C, columns]."""
    begin, offsets, mask = _places(stride, start, count, head, column, D)
    return tl.load(x + begin + offsets, mask, 0.0)


@jit
def _store_rows(x, values, start, count, head, column, HEADS: tl.constexpr, D: tl.constexpr):
    """Write [C, columns] into contiguous [T, HEADS, D]."""
    begin, offsets, mask = _places(HEADS * D, start, count, head, column, D)
    tl.store(x + begin + offsets, values.to(x.dtype.element_ty), mask)


@jit
def _running_decay(cumulative, start, count, head, HEADS: tl.constexpr):
    """G of a chunk's tokens, that of the last one also behind it, and G of the last."""
    last = tl.load(cumulative + (start + tl.minimum(count, 64) - 1).to(tl.int64) * HEADS + head)
    g = _numbers_of(cumulative, start, count, head, HEADS)
    return tl.where(tl.arange(0, 64) < count, g, last), last


@jit
def _decay(g_row, g_column, seen):
    """exp(G_row - G_column) where `seen`, else 0; never infinite."""
    return tl.where(seen, tl.exp(tl.where(seen, g_row - g_column, 0.0)), 0.0)


@jit
def _log1p(x):
    """log(1 + x), 0 <= x <= 1, without losing a small x."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def _inverse_lengths(rows, l2_eps):
    wide = rows.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + l2_eps)


@jit
def _unit_inverses(blocks):
    """(1 + A)^-1 of strictly lower blocks A [4, 16, 16], by forward substitution."""
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    turned = tl.permute(blocks, (0, 2, 1))
    inverses = tl.where(row == column, 1.0, 0.0) + tl.zeros([4, 16, 16], tl.float32)
    for i in range(1, 16):
        factors = tl.sum(tl.where(column == i, turned, 0.0), 2)
        solved = -tl.sum(factors[:, :, None] * inverses, 1)
        inverses = tl.where((row == i) & (column < i), solved[:, None, :], inverses)
    return inverses


@jit
def _unit_inverse(A, PRECISION: tl.constexpr):
    """(1 + A)^-1 of a strictly lower A [64, 64].

    With D the inverses of 1 + A's blocks on the diagonal and M = D (A below those blocks), it is
    (1 + M)^-1 D = (1 - M) (1 + M^2) D, since M^4 = 0.
    """
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    first, second = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    blocks = tl.sum(tl.where(first == second, tl.reshape(A, [4, 16, 4, 16]), 0.0), 2)
    inverses = _unit_inverses(blocks)
    D = tl.reshape(tl.where(first == second, inverses[:, :, None, :], 0.0), [64, 64])
    M = tl.dot(D, tl.where(row // 16 > column // 16, A, 0.0), input_precision=PRECISION)
    squared = tl.dot(M, M, input_precision=PRECISION)
    inverse = D + tl.dot(squared, D, input_precision=PRECISION)
    return inverse - tl.dot(M, inverse, input_precision=PRECISION)


@jit
def _prepare_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    transfer,
    cumulative,
    betas,
    q_scales,
    k_scales,
    ranges,
    q_stride,
    k_stride,
    a_stride,
    a_head,
    b_stride,
    b_head,
    chunks,
    beta_scale,
    l2_eps,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key_head = head // (HEADS // KEY_HEADS)
    key = tl.arange(0, BLOCK_K)
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    token = start.to(tl.int64) + tl.arange(0, 64)
    live = tl.arange(0, 64) < count

    shifted = tl.load(a + token * a_stride + head * a_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.maximum(shifted, 0.0) + _log1p(tl.exp(-tl.abs(shifted)))
    g = tl.cumsum(tl.where(live, -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus, 0.0), 0)
    rate = tl.load(b + token * b_stride + head * b_head, live, 0.0).to(tl.float32)
    beta = tl.where(live, beta_scale * tl.sigmoid(rate), 0.0)
    tl.store(cumulative + token * HEADS + head, g, live)
    tl.store(betas + token * HEADS + head, beta, live)

    k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
    k_scale = _inverse_lengths(k_rows, l2_eps)
    if head % (HEADS // KEY_HEADS) == 0:
        tl.store(k_scales + token * KEY_HEADS + key_head, k_scale, live)
        q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
        q_scale = scale * _inverse_lengths(q_rows, l2_eps)
        tl.store(q_scales + token * KEY_HEADS + key_head, q_scale, live)

    A = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
    A *= (beta * k_scale)[:, None] * k_scale[None, :] * _decay(g[:, None], g[None, :], row > column)
    inverse = _unit_inverse(A, SOLVE_PRECISION)
    place = transfer + (chunk.to(tl.int64) * HEADS + head) * 4096 + row * 64 + column
    tl.store(place, inverse.to(transfer.dtype.element_ty))


@jit
def _states_kernel(
    q,
    k,
    v,
    transfer,
    cumulative,
    betas,
    q_scales,
    k_scales,
    cu_seqlens,
    first_chunks,
    initial,
    o,
    states,
    new_values,
    final,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, document = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    first, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    chunk = tl.load(first_chunks + document).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside, 0.0)
    for nth in range(0, tl.cdiv(end - first, 64)):
        start = first + nth * 64
        count = end - start
        k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
        v_rows = _rows_of(v, v_stride, start, count, head, column, DV).to(tl.float32)
        g, last = _running_decay(cumulative, start, count, head, HEADS)
        beta = _numbers_of(betas, start, count, head, HEADS)
        k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
        solve = tl.load(transfer + (chunk * HEADS + head) * 4096 + row * 64 + other)
        rounded = state.to(dtype)
        if states is not None:
            tl.store(states + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        read = tl.dot(k_rows, rounded, input_precision=PRECISION) * (k_scale * tl.exp(g))[:, None]
        residual = (beta[:, None] * (v_rows - read)).to(dtype)
        new = tl.dot(solve, residual, input_precision=PRECISION)
        if new_values is not None:
            _store_rows(new_values, new, start, count, head, column, HEADS, DV)
        if o is not None:
            q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
            q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
            scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
            scores *= q_scale[:, None] * k_scale[None, :] * _decay(g[:, None], g[None, :], row >= other)
            out = tl.dot(q_rows, rounded, input_precision=PRECISION) * (q_scale * tl.exp(g))[:, None]
            out += tl.dot(scores.to(dtype), new.to(dtype), input_precision=PRECISION)
            _store_rows(o, out, start, count, head, column, HEADS, DV)
        written = (new * (k_scale * tl.exp(last - g))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(k_rows), written, input_precision=PRECISION)
        chunk += 1
    tl.store(final + of_document + place, state, inside)


@jit
def _state_grads_kernel(
    q,
    k,
    do,
    transfer,
    cumulative,
    betas,
    q_scales,
    k_scales,
    cu_seqlens,
    first_chunks,
    dfinal,
    dstates,
    dresiduals,
    dinitial,
    q_stride,
    k_stride,
    do_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, document = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    first, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    chunks = tl.cdiv(end - first, 64)
    chunk = tl.load(first_chunks + document).to(tl.int64) + chunks - 1
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal is not None:
        dstate += tl.load(dfinal + of_document + place, inside, 0.0)
    for nth in range(0, chunks):
        start = first + (chunks - 1 - nth) * 64
        count = end - start
        q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
        k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
        do_rows = _rows_of(do, do_stride, start, count, head, column, DV)
        g, last = _running_decay(cumulative, start, count, head, HEADS)
        beta = _numbers_of(betas, start, count, head, HEADS)
        q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
        k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
        # The transpose of T and of P: rows are keys, columns queries.
        solve = tl.load(transfer + (chunk * HEADS + head) * 4096 + other * 64 + row)
        scores = tl.dot(k_rows, tl.trans(q_rows), input_precision=PRECISION)
        scores *= k_scale[:, None] * q_scale[None, :] * _decay(g[None, :], g[:, None], other >= row)
        rounded = dstate.to(dtype)
        tl.store(dstates + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        dnew = tl.dot(k_rows, rounded, input_precision=PRECISION) * (k_scale * tl.exp(last - g))[:, None]
        dnew += tl.dot(scores.to(dtype), do_rows, input_precision=PRECISION)
        dresidual = tl.dot(solve, dnew.to(dtype), input_precision=PRECISION)
        _store_rows(dresiduals, dresidual, start, count, head, column, HEADS, DV)
        asked = (do_rows.to(tl.float32) * (q_scale * tl.exp(g))[:, None]).to(dtype)
        read = (dresidual * (beta * k_scale * tl.exp(g))[:, None]).to(dtype)
        dstate *= tl.exp(last)
        dstate += tl.dot(tl.trans(q_rows), asked, input_precision=PRECISION)
        dstate -= tl.dot(tl.trans(k_rows), read, input_precision=PRECISION)
        chunk -= 1
    if dinitial is not None:
        tl.store(dinitial + of_document + place, dstate, inside)


@jit
def _state_columns(states, offset, key, column, DK: tl.constexpr, DV: tl.constexpr):
    """Columns of a state, turned: [columns, BLOCK_K]."""
    inside = (column < DV)[:, None] & (key < DK)[None, :]
    return tl.load(states + offset + key[None, :] * DV + column[:, None], inside, 0.0)


@jit
def _query_grads_kernel(
    q,
    k,
    do,
    cumulative,
    q_scales,
    k_scales,
    ranges,
    states,
    new_values,
    dq,
    dcumulatives,
    q_stride,
    k_stride,
    do_stride,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
    k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
    q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
    k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
    dq_rows = tl.zeros([64, BLOCK_K], tl.float32)  # of the scaled queries, over the value heads
    for nth in range(0, HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + nth
        offset = (chunk * HEADS + head) * DK * DV
        g, _ = _running_decay(cumulative, start, count, head, HEADS)
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            do_rows = _rows_of(do, do_stride, start, count, head, column, DV)
            new = _rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = _state_columns(states, offset, key, column, DK, DV)
            by_state += tl.dot(do_rows, state, input_precision=PRECISION)
            dscores += tl.dot(do_rows, tl.trans(new), input_precision=PRECISION)
        by_state *= tl.exp(g)[:, None]
        dq_rows += by_state
        dcumulative = q_scale * tl.sum(q_rows.to(tl.float32) * by_state, 1)
        dscores *= _decay(g[:, None], g[None, :], row >= other)
        scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        # A token's own score does not decay: left out, it need not cancel.
        product = tl.where(row > other, dscores * scores * q_scale[:, None] * k_scale[None, :], 0.0)
        dcumulative += tl.sum(product, 1) - tl.sum(product, 0)
        dq_rows += tl.dot((dscores * k_scale[None, :]).to(dtype), k_rows, input_precision=PRECISION)
        _store_numbers(dcumulatives, dcumulative, start, count, head, HEADS)
    # Through the normalisation: the part along the vector itself has no effect.
    unit = q_rows.to(tl.float32) * (q_scale / scale)[:, None]
    along = tl.sum(dq_rows * unit, 1)[:, None]
    _store_rows(dq, (dq_rows - unit * along) * q_scale[:, None], start, count, key_head, key, KEY_HEADS, DK)


@jit
def _key_grads_kernel(
    q,
    k,
    v,
    do,
    cumulative,
    betas,
    q_scales,
    k_scales,
    ranges,
    states,
    dstates,
    new_values,
    dresiduals,
    dk,
    dv,
    dg,
    dbeta,
    q_stride,
    k_stride,
    v_stride,
    do_stride,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
    k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
    last_row = tl.arange(0, 64) == tl.minimum(count, 64) - 1
    dk_rows = tl.zeros([64, BLOCK_K], tl.float32)  # of the keys of length one, over the value heads
    for nth in range(0, HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + nth
        offset = (chunk * HEADS + head) * DK * DV
        g, last = _running_decay(cumulative, start, count, head, HEADS)
        beta = _numbers_of(betas, start, count, head, HEADS)

        # By the next state, and by the scores P.
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        carried = 0.0
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            do_rows = _rows_of(do, do_stride, start, count, head, column, DV)
            new = _rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = _state_columns(states, offset, key, column, DK, DV)
            dstate = _state_columns(dstates, offset, key, column, DK, DV)
            by_state += tl.dot(new, dstate, input_precision=PRECISION)
            dscores += tl.dot(new, tl.trans(do_rows), input_precision=PRECISION)
            carried += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        by_state *= tl.exp(last - g)[:, None]
        dk_rows += by_state
        # Nor does what the last token writes into the next state.
        share = tl.where(last_row, 0.0, k_scale * tl.sum(k_rows.to(tl.float32) * by_state, 1))
        dcumulative = _numbers_of(dg, start, count, head, HEADS) - share
        dlast = tl.sum(share, 0) + tl.exp(last) * carried
        q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
        q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
        dscores *= q_scale[None, :] * _decay(g[None, :], g[:, None], other >= row)
        dk_rows += tl.dot(dscores.to(dtype), q_rows, input_precision=PRECISION)

        # By what the keys read, V - exp(G) K S, and by A.
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dsolve = tl.zeros([64, 64], tl.float32)
        drate = tl.zeros([64], tl.float32)
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            dresidual = _rows_of(dresiduals, HEADS * DV, start, count, head, column, DV)
            new = _rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = _state_columns(states, offset, key, column, DK, DV)
            v_rows = _rows_of(v, v_stride, start, count, head, column, DV)
            by_state += tl.dot(dresidual, state, input_precision=PRECISION)
            dsolve -= tl.dot(dresidual, tl.trans(new), input_precision=PRECISION)
            drate += tl.sum(dresidual.to(tl.float32) * v_rows.to(tl.float32), 1)
            dvalues = dresidual.to(tl.float32) * beta[:, None]
            _store_rows(dv, dvalues, start, count, head, column, HEADS, DV)
        by_state *= tl.exp(g)[:, None]
        dk_rows -= by_state * beta[:, None]
        share = k_scale * tl.sum(k_rows.to(tl.float32) * by_state, 1)
        drate -= share
        dcumulative -= beta * share
        dsolve *= _decay(g[:, None], g[None, :], row > other)
        gram = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
        product = dsolve * gram * k_scale[:, None] * k_scale[None, :]
        drate += tl.sum(product, 1)
        product *= beta[:, None]
        dcumulative += tl.sum(product, 1) - tl.sum(product, 0)
        dsolve *= beta[:, None]
        both = ((dsolve + tl.trans(dsolve)) * k_scale[None, :]).to(dtype)
        dk_rows += tl.dot(both, k_rows, input_precision=PRECISION)

        dcumulative += tl.where(last_row, dlast, 0.0)
        # g of a token is in G of all that follow it in the chunk.
        _store_numbers(dg, tl.cumsum(dcumulative, 0, reverse=True), start, count, head, HEADS)
        _store_numbers(dbeta, drate, start, count, head, HEADS)
    unit = k_rows.to(tl.float32) * k_scale[:, None]
    along = tl.sum(dk_rows * unit, 1)[:, None]
    _store_rows(dk, (dk_rows - unit * along) * k_scale[:, None], start, count, key_head, key, KEY_HEADS, DK)
