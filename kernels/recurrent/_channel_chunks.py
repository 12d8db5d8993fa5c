"""The delta rule with a decay for each channel, on chunks of C = 64 tokens.

In a chunk, with the state S at its start, G [C, dk] the running sum of g, and rows i, j of its tokens:

    A[i, j] = beta_i sum over d of k_id k_jd exp(G_id - G_jd)   for i > j, else 0
    P[i, j] = sum over d of q_id k_jd exp(G_id - G_jd)          for i >= j, else 0
    T       = (1 + A)^-1
    W       = T beta (exp(G) K)
    U       = T beta V
    N       = U - W S                         the new values that the tokens write
    O       = (exp(G) Q) S + P N
    S'      = exp(G_C) S + (exp(G_C - G) K)^T N

and backward, with dS' from the next chunk:

    dN = P^T dO + (exp(G_C - G) K) dS'
    dS = exp(G_C) dS' + (exp(G) Q)^T dO - W^T dN
    dR = T^T dN,   dV = beta dR,   dA = -dR N^T,   dP = dO N^T,   dbeta = dR . N / beta by token

q and k here have length one, q times dk^-1/2. The kernels (`_channel_chunk_kernels.py`,
`_channel_state_kernels.py`):

    gates           G
    prepare         W, U, P, exp(G) Q ("queries"), exp(G_C - G) K ("writes"), and backward T
    states          S and N, by segment and in order over its chunks; O with them in the forward pass
    state_grads     dS' and dN, in reverse order
    score_grads     dV, dP, dA and db, by chunk and head
    channel_grads   the gradients of q, k and f, by chunk and head

No exponent is ever positive; `_channel_chunk_kernels.py` says how.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, on_device_of, once_differentiable
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.recurrent._channel_chunk_kernels import (
    channel_grads_kernel,
    gates_kernel,
    norm_grads_kernel,
    prepare_kernel,
)
from liger_models.kernels.recurrent._channel_state_kernels import (
    score_grads_kernel,
    state_grads_kernel,
    states_kernel,
)
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    NARROWEST,
    ChunkTable,
    block_of_keys,
    block_of_values,
    product_precision,
    with_whole_heads,
)
from liger_models.kernels.recurrent._states import NO_TILES, pass_state_grads, pass_states, save, saved

# Largest |G - G_m| in a block, by dtype of the operands: factors up to its exponential are exact in it.
SPANS = {torch.bfloat16: 60.0, torch.float16: 4.0, torch.float32: 16.0}
_SLICES = 4  # of the heads: gradients of a slice's normalised q and k exist at a time, in float32


class _Prepared(NamedTuple):
    """Operands of the pass over the states, in q's dtype except for the last."""

    writes: Tensor  # exp(G_C - G) K: [T, heads, dk]
    reads: Tensor  # W: [T, heads, dk]
    values: Tensor  # U: [T, heads, dv]
    queries: Tensor  # exp(G) Q: [T, heads, dk]
    scores: Tensor  # P: [chunks, heads, C, C]
    totals: Tensor  # exp(G_C): [chunks, heads, dk] float32


class ChannelDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, b, A_log, dt_bias, state, table, lower_bound, beta_scale, l2_eps):
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        f = f if f.stride(2) == 1 else f.contiguous()
        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
        state = None if state is None else state.float().contiguous()
        ctx.table, ctx.lower_bound, ctx.beta_scale, ctx.l2_eps = table, lower_bound, beta_scale, l2_eps
        ctx.set_materialize_grads(False)
        with on_device_of(q):
            cumulative = _run_gates(f, A_log, dt_bias, table, lower_bound)
            prepared = _prepare(q, k, v, b, cumulative, table, beta_scale, l2_eps)
            o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            final, between = pass_states(
                states_kernel, prepared, NO_TILES, (), _sizes(q, v), table, state, output=o
            )
        save(ctx, (q, k, v, f, b, A_log, dt_bias, state), between)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        (q, k, v, f, b, A_log, dt_bias, state), between = saved(ctx)
        table = ctx.table
        (heads, dk_size), width = q.shape[1:], v.shape[2]
        chunks = table.ranges.shape[1]
        do = torch.zeros_like(v) if do is None else with_whole_heads(do)

        def empty(*shape):
            return torch.empty(shape, dtype=q.dtype, device=q.device)

        with on_device_of(q):
            cumulative = _run_gates(f, A_log, dt_bias, table, ctx.lower_bound)
            transfer = empty(chunks, heads, CHUNK, CHUNK)
            prepared = _prepare(q, k, v, b, cumulative, table, ctx.beta_scale, ctx.l2_eps, transfer)
            states, dstates = (empty(chunks, heads, dk_size, width) for _ in range(2))
            sizes, new = _sizes(q, v), prepared.values  # overwrite U with N
            pass_states(
                states_kernel,
                prepared,
                NO_TILES,
                (),
                sizes,
                table,
                state,
                states=states,
                new=new,
                between=between,
            )
            dvalues = empty(*v.shape)
            dstate = None if state is None else torch.empty_like(state)
            operands = (prepared.writes, prepared.reads, *prepared[3:], do)
            pass_state_grads(
                state_grads_kernel,
                operands,
                NO_TILES,
                (do.stride(0),),
                sizes,
                table,
                dfinal,
                between,
                (dstates, dvalues, dstate),
            )
            dscores, dsolve = prepared.scores, transfer
            db = _run_score_grads(b, do, new, dscores, dsolve, dvalues, table, ctx.beta_scale)
            del prepared, operands, between  # free their memory for the gradients
            gates = f, A_log, dt_bias, ctx.lower_bound
            dq, dk, df, *sums = _run_channel_grads(
                q,
                k,
                gates,
                do,
                cumulative,
                (dscores, dsolve, states, dstates, new, dvalues),
                table,
                ctx.l2_eps,
            )
        dA_log, ddt_bias = (x.sum(0).to(y.dtype) for x, y in zip(sums, (A_log, dt_bias), strict=True))
        return dq, dk, dvalues, df, db, dA_log, ddt_bias, dstate, None, None, None, None


def _part(q: Tensor) -> int:
    """Channels per program, or per step of one: as many as the registers hold."""
    return NARROWEST if gpu_of(q).family in ("hopper", "cdna") else NARROWEST // 2


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
            BLOCK_K=block_of_keys(dk),
            BOUNDED=lower_bound is not None,
            num_warps=4,
        )
    return cumulative


def _sizes(q: Tensor, v: Tensor) -> dict[str, int | str]:
    return {
        "HEADS": q.shape[1],
        "DK": q.shape[2],
        "DV": v.shape[2],
        "BLOCK_K": block_of_keys(q.shape[2]),
        "PRECISION": product_precision(q.dtype),
    }


def _prepare(q, k, v, b, cumulative, table, beta_scale, l2_eps, transfer=None) -> _Prepared:
    (tokens, heads, dk), chunks = q.shape, table.ranges.shape[1]
    like = {"dtype": q.dtype, "device": q.device}
    writes, reads, queries = (torch.empty(tokens, heads, dk, **like) for _ in range(3))
    values = torch.empty(v.shape, **like)
    scores = torch.empty(chunks, heads, CHUNK, CHUNK, **like)
    totals = torch.empty(chunks, heads, dk, dtype=torch.float32, device=q.device)
    prepared = _Prepared(writes, reads, values, queries, scores, totals)
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
            BLOCK_V=block_of_values(v.shape[2], 64),
            BLOCK_PART=_part(q),
            SPAN=SPANS[q.dtype],
            SOLVE_PRECISION=product_precision(q.dtype),
            num_warps=8,
            num_stages=1,
        )
    return prepared


def _run_channel_grads(q, k, gates, do, cumulative, found, table, l2_eps) -> tuple[Tensor, ...]:
    """dq, dk and df, and the terms of dA_log and ddt_bias."""
    (tokens, heads, dk_size), dv_size = q.shape, do.shape[2]
    chunks, (f, A_log, dt_bias, lower_bound) = table.ranges.shape[1], gates
    dq, dk, df = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, f))
    parts, held = ceil_div(dk_size, _part(q)), heads // (_SLICES if heads % _SLICES == 0 else 1)
    like = {"dtype": torch.float32, "device": q.device}
    rates = torch.zeros(parts * chunks, heads, **like)
    biases = torch.zeros(chunks, heads, dk_size, **like)
    if not tokens:
        return dq, dk, df, rates, biases
    of_unit = torch.empty(2, tokens, held, dk_size, **like)
    sizes = {"HEADS": heads, "HELD": held, "DK": dk_size, "BLOCK_K": block_of_keys(dk_size)}
    for first in range(0, heads, held):
        channel_grads_kernel[(chunks, held, parts)](
            q,
            k,
            f,
            A_log,
            dt_bias,
            do,
            cumulative,
            *found,
            *of_unit,
            df,
            rates,
            biases,
            table.ranges,
            q.stride(0),
            k.stride(0),
            *f.stride()[:2],
            do.stride(0),
            chunks,
            first,
            0.0 if lower_bound is None else lower_bound,
            l2_eps,
            dk_size**-0.5,
            **sizes,
            DV=dv_size,
            PRECISION=product_precision(q.dtype),
            BLOCK_V=block_of_values(dv_size, 64),
            BLOCK_PART=_part(q),
            SPAN=SPANS[q.dtype],
            BOUNDED=lower_bound is not None,
            num_warps=4 if gpu_of(q).warp_size == 64 else 8,
            num_stages=1,
        )
        norm_grads_kernel[(chunks, held)](
            q,
            k,
            *of_unit,
            dq,
            dk,
            table.ranges,
            q.stride(0),
            k.stride(0),
            chunks,
            first,
            l2_eps,
            dk_size**-0.5,
            **sizes,
            num_warps=4,
        )
    return dq, dk, df, rates, biases


def _run_score_grads(b, do, new, dscores, dsolve, dvalues, table, beta_scale) -> Tensor:
    """Turn P into dP, T into dA and dN into dV in place; return db."""
    db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    chunks, (tokens, heads, dv) = table.ranges.shape[1], do.shape
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
            beta_scale,
            HEADS=heads,
            DV=dv,
            PRECISION=product_precision(do.dtype),
            BLOCK_V=block_of_values(dv, 64),
            num_warps=4,
            num_stages=1,
        )
    return db
