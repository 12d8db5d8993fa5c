"""The delta rule with a decay for each channel, on chunks of C = 64 tokens.

In a chunk, with the state S at its start, G [C, dk] the running sum of g, and rows i, j of its tokens:

    A[i, j] = beta_i sum over d of k_id k_jd exp(G_id - G_jd)   for i > j, else 0
    P[i, j] = sum over d of q_id k_jd exp(G_id - G_jd)          for i >= j, else 0
    T       = (1 + A)^-1
    W       = T beta (exp(G) K)               "reads"
    U       = T beta V                        "values"
    N       = U - W S                         the new values that the tokens write
    O       = (exp(G) Q) S + P N
    S'      = exp(G_C) S + (exp(G_C - G) K)^T N

and backward, with dS' from the next chunk:

    dN = P^T dO + (exp(G_C - G) K) dS'
    dS = exp(G_C) dS' + (exp(G) Q)^T dO - W^T dN
    dR = T^T dN,   dV = beta dR,   dA = -dR N^T,   dbeta = dR . N / beta by token

q and k here have length one, q times dk^-1/2. The kernels (`_channel_chunk_kernels.py`, `_state_kernels.py`):

    gates           G
    prepare         W, U, P, exp(G) Q ("queries"), exp(G_C - G) K ("writes"), and backward T
    states          S and N, in order over the chunks of a document; O with them in the forward pass
    state_grads     dS' and dN, in reverse order
    score_grads     dV, dP, dA and db, by chunk and head
    channel_grads   the gradients of q, k and f, by chunk and head

No exponent is ever positive; `_channel_chunk_kernels.py` says how.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, next_power_of_2, on_device_of, once_differentiable
from liger_models.kernels.recurrent._channel_chunk_kernels import (
    channel_grads_kernel,
    gates_kernel,
    prepare_kernel,
    score_grads_kernel,
)
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    ChunkTable,
    block_of_values,
    product_precision,
    with_whole_heads,
)
from liger_models.kernels.recurrent._state_kernels import state_grads_kernel, states_kernel


class _Prepared(NamedTuple):
    writes: Tensor  # [T, heads, dk], as all of these in q's dtype
    reads: Tensor  # W: [T, heads, dk]
    values: Tensor  # U: [T, heads, dv]
    queries: Tensor  # [T, heads, dk]
    scores: Tensor  # P: [chunks, heads, C, C]


class ChannelDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, b, A_log, dt_bias, state, table, lower_bound, beta_scale, l2_eps):
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        f = f if f.stride(2) == 1 else f.contiguous()
        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
        state = None if state is None else state.float().contiguous()
        ctx.save_for_backward(q, k, v, f, b, A_log, dt_bias, state)
        ctx.table, ctx.lower_bound, ctx.beta_scale, ctx.l2_eps = table, lower_bound, beta_scale, l2_eps
        ctx.set_materialize_grads(False)
        with on_device_of(q):
            cumulative = _run_gates(f, A_log, dt_bias, table, lower_bound)
            prepared = _prepare(q, k, v, b, cumulative, table, beta_scale, l2_eps)
            o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            final = _run_states(prepared, cumulative, table, state, output=o)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        q, k, v, f, b, A_log, dt_bias, state = ctx.saved_tensors
        table = ctx.table
        (tokens, heads, dk_size), width = q.shape, v.shape[2]
        chunks = table.ranges.shape[1]
        do = torch.zeros_like(v) if do is None else with_whole_heads(do)

        def empty(*shape):
            return torch.empty(shape, dtype=q.dtype, device=q.device)

        with on_device_of(q):
            cumulative = _run_gates(f, A_log, dt_bias, table, ctx.lower_bound)
            transfer = empty(chunks, heads, CHUNK, CHUNK)
            prepared = _prepare(q, k, v, b, cumulative, table, ctx.beta_scale, ctx.l2_eps, transfer)
            states, dstates = (empty(chunks, heads, dk_size, width) for _ in range(2))
            _run_states(prepared, cumulative, table, state, states=states)
            new, dvalues = prepared.values, empty(*v.shape)  # states_kernel wrote N over U
            dstate = _run_state_grads(prepared, cumulative, do, table, dfinal, dstates, dvalues, state)
            dscores, dsolve, db = (
                prepared.scores,
                transfer,
                torch.empty(b.shape, dtype=b.dtype, device=b.device),
            )
            del prepared  # its memory serves the gradients
            dq, dk, df, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, f, b))
            sums = [
                torch.zeros(chunks, *x.shape, dtype=torch.float32, device=x.device) for x in (A_log, dt_bias)
            ]
            sizes = _sizes(q, v)
            if tokens:
                score_grads_kernel[(chunks, heads)](
                    b,
                    do,
                    new,
                    dscores,
                    dsolve,
                    dvalues,
                    db,
                    table.ranges,
                    *b.stride(),
                    do.stride(0),
                    chunks,
                    ctx.beta_scale,
                    HEADS=heads,
                    DV=width,
                    PRECISION=sizes["PRECISION"],
                    BLOCK_V=block_of_values(v, 64),
                    num_warps=4,
                    num_stages=1,
                )
                channel_grads_kernel[(chunks, heads)](
                    q,
                    k,
                    f,
                    A_log,
                    dt_bias,
                    do,
                    cumulative,
                    dscores,
                    dsolve,
                    states,
                    dstates,
                    new,
                    dvalues,
                    dq,
                    dk,
                    df,
                    *sums,
                    table.ranges,
                    q.stride(0),
                    k.stride(0),
                    *f.stride()[:2],
                    do.stride(0),
                    chunks,
                    0.0 if ctx.lower_bound is None else ctx.lower_bound,
                    ctx.l2_eps,
                    dk_size**-0.5,
                    **sizes,
                    BLOCK_V=block_of_values(v, 64),
                    BLOCK_PART=max(16, next_power_of_2(dk_size) // 2),
                    BOUNDED=ctx.lower_bound is not None,
                    num_warps=8,
                    num_stages=1,
                )
        dA_log, ddt_bias = (x.sum(0).to(y.dtype) for x, y in zip(sums, (A_log, dt_bias), strict=True))
        return dq, dk, dvalues, df, db, dA_log, ddt_bias, dstate, None, None, None, None


def _sizes(q: Tensor, v: Tensor) -> dict[str, int | str]:
    return {
        "HEADS": q.shape[1],
        "DK": q.shape[2],
        "DV": v.shape[2],
        "BLOCK_K": max(16, next_power_of_2(q.shape[2])),
        "PRECISION": product_precision(q.dtype),
    }


def _run_gates(f: Tensor, A_log: Tensor, dt_bias: Tensor, table: ChunkTable, lower_bound) -> Tensor:
    tokens, heads, dk = f.shape
    chunks = table.ranges.shape[1]
    cumulative = torch.empty(tokens, heads, dk, dtype=torch.float32, device=f.device)
    if tokens:
        gates_kernel[(chunks, heads)](
            f,
            A_log,
            dt_bias,
            cumulative,
            table.ranges,
            *f.stride()[:2],
            chunks,
            0.0 if lower_bound is None else lower_bound,
            HEADS=heads,
            DK=dk,
            BLOCK_K=max(16, next_power_of_2(dk)),
            BOUNDED=lower_bound is not None,
            num_warps=4,
        )
    return cumulative


def _prepare(q, k, v, b, cumulative, table, beta_scale, l2_eps, transfer=None) -> _Prepared:
    (tokens, heads, dk), chunks = q.shape, table.ranges.shape[1]
    like = {"dtype": q.dtype, "device": q.device}
    keys = [torch.empty(tokens, heads, dk, **like) for _ in range(3)]
    scores = torch.empty(chunks, heads, CHUNK, CHUNK, **like)
    prepared = _Prepared(keys[0], keys[1], torch.empty(v.shape, **like), keys[2], scores)
    if tokens:
        prepare_kernel[(chunks, heads)](
            q,
            k,
            v,
            b,
            cumulative,
            *prepared,
            transfer,
            table.ranges,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            *b.stride(),
            chunks,
            beta_scale,
            l2_eps,
            dk**-0.5,
            **_sizes(q, v),
            BLOCK_V=block_of_values(v, 64),
            SOLVE_PRECISION="tf32" if q.dtype != torch.float32 else product_precision(q.dtype),
            num_warps=8,
            num_stages=1,
        )
    return prepared


def _run_states(prepared, cumulative, table, state, output=None, states=None) -> Tensor:
    """Pass states over the chunks and return the final ones; write O, or S and N (over U)."""
    (_, heads, dk), width = cumulative.shape, prepared.values.shape[2]
    documents = len(table.first_chunks)
    final = torch.empty(documents, heads, dk, width, dtype=torch.float32, device=cumulative.device)
    block = block_of_values(prepared.values, 64)
    if documents:
        states_kernel[(ceil_div(width, block), heads, documents)](
            *prepared,
            cumulative,
            table.cu_seqlens,
            table.first_chunks,
            state,
            output,
            states,
            None if states is None else prepared.values,
            final,
            **_sizes(prepared.writes, prepared.values),
            BLOCK_V=block,
            num_warps=4,
            num_stages=1,
        )
    return final


def _run_state_grads(prepared, cumulative, do, table, dfinal, dstates, dnew, state) -> Tensor | None:
    """Pass the states' gradients back. Write dS' to `dstates` and dN to `dnew`; returns dstate."""
    dstate = None if state is None else torch.empty_like(state)
    block = block_of_values(do, 64)
    if len(table.first_chunks):
        state_grads_kernel[(ceil_div(do.shape[2], block), do.shape[1], len(table.first_chunks))](
            prepared.writes,
            prepared.reads,
            prepared.queries,
            prepared.scores,
            cumulative,
            do,
            table.cu_seqlens,
            table.first_chunks,
            None if dfinal is None else dfinal.float().contiguous(),
            dstates,
            dnew,
            dstate,
            do.stride(0),
            **_sizes(prepared.writes, do),
            BLOCK_V=block,
            num_warps=4,
            num_stages=1,
        )
    return dstate
