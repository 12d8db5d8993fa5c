"""The gated delta rule on chunks of C = 64 tokens.

In a chunk, with the state S at its start, G the running sum of g, and rows i, j of its tokens:

    A[i, j] = beta_i exp(G_i - G_j) k_i . k_j   for i > j, else 0
    T       = (1 + A)^-1
    R       = beta (V - exp(G) K S)                      each token's write, ignoring the others
    N       = T R                                        the actual writes
    P[i, j] = exp(G_i - G_j) q_i . k_j          for i >= j, else 0
    O       = exp(G) Q S + P N
    S'      = exp(G_C) S + (exp(G_C - G) K)^T N

and backward, with dS' from the next chunk:

    dN = P^T dO + exp(G_C - G) K dS'
    dR = T^T dN,   dV = beta dR,   dA = -dR N^T          (T^T dN N^T needs no product with T: N = T R)
    dS = exp(G_C) dS' + (exp(G) Q)^T dO - (beta exp(G) K)^T dR

The kernels (`_delta_chunk_kernels.py`, `_delta_state_kernels.py`); only the second and third depend on other
chunks:

    prepare        T, G, beta and the inverse lengths of q and k, by chunk and value head
    states         S and N, by segment and in order over its chunks; O with them in the forward pass
    state_grads    dS' and dR, in reverse order
    query_grads    dq and its share of dg, by chunk and key head
    key_grads      dk, dv, dg and dbeta, by chunk and key head

q and k are read unnormalised: their products are scaled by the inverse lengths, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import on_device_of, once_differentiable, rows_to_copy
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    block_of_keys,
    block_of_values,
    product_precision,
    with_whole_heads,
)
from liger_models.kernels.recurrent._delta_chunk_kernels import (
    key_grads_kernel,
    prepare_kernel,
    query_grads_kernel,
)
from liger_models.kernels.recurrent._delta_state_kernels import state_grads_kernel, states_kernel
from liger_models.kernels.recurrent._states import pass_state_grads, pass_states


class _Prepared(NamedTuple):
    transfer: Tensor  # T: [chunks, heads, C, C] in q's dtype
    cumulative: Tensor  # G: [tokens, heads]
    beta: Tensor  # [tokens, heads]
    q_scale: Tensor  # [tokens, key_heads], inverse lengths, with dk^-1/2
    k_scale: Tensor  # [tokens, key_heads]


class GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, a, b, A_log, dt_bias, state, table, beta_scale, l2_eps):
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
        state = None if state is None else state.float().contiguous()
        ctx.save_for_backward(q, k, v, a, b, A_log, dt_bias, state)
        ctx.table, ctx.beta_scale, ctx.l2_eps = table, beta_scale, l2_eps
        ctx.set_materialize_grads(False)
        with on_device_of(q):
            prepared = _prepare(q, k, a, b, A_log, dt_bias, table, beta_scale, l2_eps)
            o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            strides = q.stride(0), k.stride(0), v.stride(0)
            final, _ = pass_states(
                states_kernel, (q, k, v, *prepared), strides, _sizes(q, v), table, state, output=o
            )
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        q, k, v, a, b, A_log, dt_bias, state = ctx.saved_tensors
        table = ctx.table
        heads, dv_size = v.shape[1:]
        do = torch.zeros_like(v) if do is None else with_whole_heads(do)
        with on_device_of(q):
            prepared = _prepare(q, k, a, b, A_log, dt_bias, table, ctx.beta_scale, ctx.l2_eps)
            shape = table.ranges.shape[1], heads, q.shape[2], dv_size
            states, dstates = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
            new = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            sizes, strides = _sizes(q, v), (q.stride(0), k.stride(0), v.stride(0))
            _, between = pass_states(
                states_kernel, (q, k, v, *prepared), strides, sizes, table, state, states=states, new=new
            )
            dresidual = torch.empty_like(new)
            dstate = None if state is None else torch.empty_like(state)
            strides = q.stride(0), k.stride(0), do.stride(0)
            pass_state_grads(
                state_grads_kernel,
                (q, k, do, *prepared),
                strides,
                sizes,
                table,
                dfinal,
                between,
                dstates,
                dresidual,
                dstate,
            )
            numbers = prepared[1:]
            del prepared, between  # free their memory for the gradients
            dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
            dg, dbeta = (torch.empty_like(numbers[0]) for _ in range(2))
            _run_operand_grads(
                q, k, v, do, numbers, table, states, dstates, new, dresidual, dq, dk, dg, dbeta
            )
            dv = dresidual  # overwritten by dV
        # The gates' own gradients: tensors with one number per token and head.
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


def _sizes(q: Tensor, v: Tensor) -> dict[str, int | str]:
    return {
        "HEADS": v.shape[1],
        "KEY_HEADS": q.shape[1],
        "DK": q.shape[2],
        "DV": v.shape[2],
        "BLOCK_K": block_of_keys(q.shape[2]),
        "PRECISION": product_precision(q.dtype),
    }


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
        prepare_kernel[(chunks, heads)](
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
            BLOCK_K=block_of_keys(dk),
            PRECISION=product_precision(q.dtype),
            SOLVE_PRECISION="tf32" if q.dtype != torch.float32 else product_precision(q.dtype),
            num_warps=4,
        )
    return prepared


def _run_operand_grads(
    q, k, v, do, numbers, table, states, dstates, new, dresidual, dq, dk, dg, dbeta
) -> None:
    """Write dq, dk, dg and dbeta, and dV over dR."""
    if not len(q):
        return
    cumulative, _, q_scale, k_scale = numbers
    chunks = table.ranges.shape[1]
    block, dv_size = block_of_values(v.shape[2], 64), v.shape[2]
    block_k = block_of_keys(q.shape[2])
    tiles = [None] * 3
    if block_k == q.shape[2] <= 128:
        tiles = rows_to_copy(CHUNK, do, new, columns=block)
        tiles += rows_to_copy(block_k, states.view(-1, 1, dv_size), columns=block)
        tiles = [None] * 3 if None in tiles else tiles
    query_grads_kernel[(chunks, q.shape[1])](
        q,
        k,
        do,
        cumulative,
        q_scale,
        k_scale,
        table.ranges,
        states,
        new,
        dq,
        dg,
        *tiles,
        q.stride(0),
        k.stride(0),
        do.stride(0),
        chunks,
        q.shape[2] ** -0.5,
        **_sizes(q, v),
        BLOCK_V=block,
        num_warps=8 if None in tiles else 4,
        num_stages=2 if block_k <= 128 else 1,
    )
    key_grads_kernel[(chunks, q.shape[1])](
        q,
        k,
        v,
        do,
        *numbers,
        table.ranges,
        states,
        dstates,
        new,
        dresidual,
        dk,
        dresidual,
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
