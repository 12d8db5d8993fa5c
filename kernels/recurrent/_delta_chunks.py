"""The gated delta rule on chunks of C = 64 tokens.

In a chunk, with the state S at its start, G the running sum of g, and rows i, j of its tokens:

    A[i, j] = beta_i exp(G_i - G_j) k_i . k_j   for i > j, else 0
    T       = (1 + A)^-1 beta
    N       = T (V - exp(G) K S)                the new values that the tokens write
    P[i, j] = exp(G_i - G_j) q_i . k_j          for i >= j, else 0
    O       = exp(G) Q S + P N
    S'      = exp(G_C) S + (exp(G_C - G) K)^T N

and backward, with dS' from the next chunk:

    dN = P^T dO + exp(G_C - G) K dS'
    dV = T^T dN
    dS = exp(G_C) dS' + (exp(G) Q)^T dO - (exp(G) K)^T dV
    dP = dO N^T,   beta dA = -dV N^T,   dbeta = dV . N / beta^2 by token

The kernels (`_delta_chunk_kernels.py`, `_delta_state_kernels.py`); only the second and third depend on other
chunks:

    prepare         T, P, G, beta, the inverse lengths of q and k, and with the decays multiplied by them
    states          S and N, by segment and in order over its chunks; O with them in the forward pass
    state_grads     dS' and dV, in reverse order; what dk and dG take from dS', which is not stored
    score_grads     dP and beta dA, with the decays, db, and their share of dG, by chunk and head
    operand_grads   dq, dk and dG, by chunk and key head
    gate_grads      da, and the terms of dA_log and ddt_bias

q and k are read unnormalised: their products are scaled by the inverse lengths, in float32. Products with a
state or its gradient are computed transposed: they then have the state's 128 rows instead of the chunk's 64,
which keeps 8 warps busy, and one product gives the next its factor in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    next_power_of_2,
    on_device_of,
    once_differentiable,
    rows_to_copy,
)
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    block_of_keys,
    block_of_values,
    limit_registers,
    product_precision,
    with_whole_heads,
)
from liger_models.kernels.recurrent._delta_chunk_kernels import (
    gate_grads_kernel,
    operand_grads_kernel,
    prepare_kernel,
    score_grads_kernel,
)
from liger_models.kernels.recurrent._delta_state_kernels import state_grads_kernel, states_kernel
from liger_models.kernels.recurrent._states import (
    count_blocks,
    pass_state_grads,
    pass_states,
    save,
    saved,
    tiles_of,
)


class _Prepared(NamedTuple):
    transfer: Tensor  # T: [chunks, heads, C, C] in q's dtype
    scores: Tensor  # P, likewise
    decays: Tensor  # G: [chunks, heads, C], as the next four
    betas: Tensor
    read_factors: Tensor  # exp(G) / |k|
    write_factors: Tensor  # exp(G_C - G) / |k|
    query_factors: Tensor  # exp(G) dk^-1/2 / |q|
    q_lengths: Tensor  # 1 / |q|: [chunks, key_heads, C]
    k_lengths: Tensor


class GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, a, b, A_log, dt_bias, state, table, beta_scale, l2_eps):
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
        state = None if state is None else state.float().contiguous()
        ctx.table, ctx.beta_scale, ctx.l2_eps = table, beta_scale, l2_eps
        ctx.set_materialize_grads(False)
        with on_device_of(q):
            prepared = _prepare(q, k, a, b, A_log, dt_bias, table, beta_scale, l2_eps)
            o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            strides = q.stride(0), k.stride(0), v.stride(0)
            tiles = tiles_of((q, k), (v,), prepared[:2])
            final, between = pass_states(
                states_kernel, (q, k, v, *prepared), tiles, strides, _sizes(q, v), table, state, output=o
            )
        save(ctx, (q, k, v, a, b, A_log, dt_bias, state), between)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        (q, k, v, a, b, A_log, dt_bias, state), between = saved(ctx)
        table = ctx.table
        heads, dv_size = v.shape[1:]
        do = torch.zeros_like(v) if do is None else with_whole_heads(do)
        with on_device_of(q):
            prepared = _prepare(q, k, a, b, A_log, dt_bias, table, ctx.beta_scale, ctx.l2_eps)
            chunks = table.ranges.shape[1]
            states = q.new_empty(chunks, heads, dv_size, q.shape[2])  # transposed
            new = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            sizes, strides = _sizes(q, v), (q.stride(0), k.stride(0), v.stride(0))
            tiles, operands = tiles_of((q, k), (v,), prepared[:2]), (q, k, v, *prepared)
            pass_states(
                states_kernel,
                operands,
                tiles,
                strides,
                sizes,
                table,
                state,
                states=states,
                new=new,
                between=between,
            )
            dv = torch.empty_like(new)
            dstate = None if state is None else torch.empty_like(state)
            tiles = tiles_of((q, k), (do, new), prepared[:2])
            blocks = count_blocks(dv_size, tiles)
            written = q.new_empty(blocks, len(q), heads, q.shape[2])
            carried = prepared.decays.new_empty(chunks, heads, dv_size)
            pass_state_grads(
                state_grads_kernel,
                (q, k, do, *prepared),
                tiles,
                (q.stride(0), k.stride(0), do.stride(0), written.stride(0)),
                sizes,
                table,
                dfinal,
                between,
                (new, states, written, carried, dv, dstate),
            )
            del operands, between  # free its memory for the gradients
            gates = a, b, A_log, dt_bias
            dq, dk, da, db, gate_sums = _run_operand_grads(
                q, k, do, gates, prepared, table, ctx.beta_scale, states, written, carried, new, dv
            )
        dA_log, ddt_bias = gate_sums.sum(1)
        return (
            dq,
            dk,
            dv,
            da,
            db,
            dA_log.to(A_log.dtype),
            ddt_bias.to(dt_bias.dtype),
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
    like = {"dtype": torch.float32, "device": q.device}
    prepared = _Prepared(
        *(torch.empty(chunks, heads, CHUNK, CHUNK, dtype=q.dtype, device=q.device) for _ in range(2)),
        *torch.empty(5, chunks, heads, CHUNK, **like).unbind(),
        *torch.empty(2, chunks, key_heads, CHUNK, **like).unbind(),
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
            SOLVE_PRECISION=product_precision(q.dtype),
            num_warps=4,
            **limit_registers(q, 168),
        )
    return prepared


def _in_place_of(new: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for dq and dk: that of N, if a key head's part has room for both."""
    tokens, key_heads, dk = q.shape
    room = new.shape[1] * new.shape[2] // key_heads
    if room < 2 * dk:
        return q.new_empty(q.shape), q.new_empty(q.shape)
    parts = new.view(tokens, key_heads, room)
    return parts[:, :, :dk], parts[:, :, dk : 2 * dk]


def _run_operand_grads(
    q, k, do, gates, prepared, table, beta_scale, states, written, carried, new, dv
) -> tuple[Tensor, ...]:
    """dq, dk, da, db, and the terms of dA_log and ddt_bias by chunk and head, [2, chunks, heads] float32.
    Overwrites P, T and perhaps N.
    """
    chunks, (tokens, heads, dv_size) = table.ranges.shape[1], dv.shape
    transfer, scores, decays, betas, *factors, q_lengths, k_lengths = prepared
    a, b, A_log, dt_bias = gates
    dq, dk = _in_place_of(new, q)
    da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))
    ddecays = torch.empty(2, *decays.shape, dtype=torch.float32, device=q.device)
    gate_sums = decays.new_zeros(2, chunks, heads)
    if not tokens:
        return dq, dk, da, db, gate_sums
    block, scale = block_of_values(dv_size, 64), q.shape[2] ** -0.5
    values = do, new, dv
    tiles = rows_to_copy(CHUNK, *values, columns=block)
    options = {**_sizes(q, dv), "BLOCK_V": block}
    score_grads_kernel[(chunks, heads)](
        k,
        do,
        scores,
        transfer,
        decays,
        betas,
        q_lengths,
        k_lengths,
        table.ranges,
        new,
        dv,
        ddecays[0],
        db,
        *tiles,
        k.stride(0),
        do.stride(0),
        chunks,
        beta_scale,
        scale,
        **options,
        num_warps=4,
        num_stages=2,
        **limit_registers(q, 168 if None in tiles else 128),
    )
    tiles = rows_to_copy(CHUNK, q, k)
    tiles += rows_to_copy(CHUNK, do, dv, columns=block)
    tiles += rows_to_copy(CHUNK, *(x.view(-1, 1, CHUNK) for x in (scores, transfer)))
    tiles += rows_to_copy(block, states.view(-1, 1, q.shape[2]))
    if None in tiles or q.shape[2] > 128:
        tiles = [None] * len(tiles)
    operand_grads_kernel[(chunks, q.shape[1])](
        q,
        k,
        do,
        scores,
        transfer,
        decays,
        *factors,
        q_lengths,
        k_lengths,
        table.ranges,
        states,
        written,
        carried,
        dv,
        ddecays,
        dq,
        dk,
        *tiles,
        q.stride(0),
        k.stride(0),
        do.stride(0),
        *dq.stride()[:2],
        written.stride(0),
        chunks,
        scale,
        **options,
        BLOCK_VALUES=next_power_of_2(dv_size),
        BLOCKS=len(written),
        num_warps=8 if None in tiles and q.shape[2] > 64 else 4,
        num_stages=1 if None in tiles else 3,
    )
    gate_grads_kernel[(chunks, heads)](
        a,
        A_log,
        dt_bias,
        ddecays,
        da,
        gate_sums,
        table.ranges,
        *a.stride(),
        chunks,
        HEADS=heads,
        num_warps=1,
    )
    return dq, dk, da, db, gate_sums
