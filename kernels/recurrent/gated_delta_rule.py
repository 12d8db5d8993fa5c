"""Gated delta rule, with a decay for each head (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464).

For every value head, with a state S [dk, dv] that starts at zero in each document:

    g_t    = -exp(A_log) * softplus(a_t + dt_bias)          logarithm of the decay
    beta_t = beta_scale * sigmoid(b_t)
    q_t, k_t  normalised to length one; q_t also times dk^-1/2
    S     <- exp(g_t) S
    S     <- S + k_t (beta_t (v_t - S^T k_t))^T
    o_t    = S^T q_t

A key head serves as many value heads as there are value heads per key head. Everything is computed in
float32 but for the operands of matrix products, which are rounded to q's dtype.

Training works on chunks of 64 tokens (section 3.3 of the paper; `_delta_chunks.py` has the kernels and their
formulas). Documents never share a chunk. Nothing is kept for the backward pass but the operands: states,
of dk x dv for each chunk and head, are computed again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import as_once_differentiable, at_least_float32
from liger_models.kernels.recurrent._chunk_table import ChunkTables, chunk_table, use_chunks
from liger_models.kernels.recurrent._delta_chunks import GatedDeltaRule
from liger_models.kernels.recurrent._recurrence import L2_EPS, check_heads, delta_rule, delta_step


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    beta_scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    tables: ChunkTables | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over packed documents.

    Args:
        q, k: [T, key_heads, dk], float dtype, not normalised.
        v: [T, value_heads, dv] in q's dtype; value_heads is a multiple of key_heads.
        a, b: [T, value_heads], the decay and the learning rate before their functions.
        A_log, dt_bias: [value_heads].
        beta_scale: 2.0 lets a state's eigenvalues be negative (OLMo-hybrid).
        cu_seqlens: [documents + 1] integers that rise from 0 to T; None for one document.
        state: [documents, value_heads, dk, dv] float32, the states to continue from; None for zeros.
        tables: of the same documents, to find their chunks once for several calls; None: they are found here.

    Returns:
        o [T, value_heads, dv] in v's dtype, and the final state of every document, as `state`; float64 for
        float64 operands. Gradients flow through both. Running it again gives the same bits.

        On a GPU, float32 with dk or dv above 64 runs token by token, which is slow.

    Raises:
        ValueError: shapes or dtypes that do not fit, or tensors on several devices.
    """
    _check(q, k, v, a, b, A_log, dt_bias, cu_seqlens, state)
    if use_chunks(q, v, k, a, b, A_log, dt_bias, state):
        table = chunk_table(cu_seqlens, q.shape[0], q.device, v.shape[1], tables)
        return GatedDeltaRule.apply(q, k, v, a, b, A_log, dt_bias, state, table, beta_scale, L2_EPS)
    return as_once_differentiable(
        *gated_delta_rule_plain(q, k, v, a, b, A_log, dt_bias, beta_scale, cu_seqlens, state)
    )


def gated_delta_rule_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `gated_delta_rule`, token by token."""
    return delta_rule(q, k, v, *_gates(a, b, A_log, dt_bias, beta_scale), cu_seqlens, state)


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Process one further token of every sequence, for decoding.

    Args:
        q, k, v, a, b: as in `gated_delta_rule`, with sequences in place of tokens.
        A_log, dt_bias, beta_scale: as in `gated_delta_rule`.
        state: [sequences, value_heads, dk, dv] float32.

    Returns:
        o [sequences, value_heads, dv] in v's dtype, and the new state, a new tensor.
    """
    return delta_step(q, k, v, *_gates(a, b, A_log, dt_bias, beta_scale), state)


def _gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, beta_scale: float) -> tuple[Tensor, Tensor]:
    """Return decay [T, heads, 1] and beta [T, heads]."""
    decay = torch.exp(-at_least_float32(A_log).exp() * F.softplus(at_least_float32(a) + dt_bias))
    return decay[..., None], beta_scale * torch.sigmoid(at_least_float32(b))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    check_heads(q, k, v, cu_seqlens, state, widest_key=256)
    heads = v.shape[1]
    if heads % q.shape[1]:
        raise ValueError(f"there are {heads} value heads for {q.shape[1]} key heads; expected a multiple")
    if a.shape != v.shape[:2] or b.shape != v.shape[:2]:
        raise ValueError(f"a is {tuple(a.shape)}, b {tuple(b.shape)}; expected {tuple(v.shape[:2])}")
    if A_log.shape != (heads,) or dt_bias.shape != (heads,):
        found = f"A_log is {tuple(A_log.shape)}, dt_bias {tuple(dt_bias.shape)}"
        raise ValueError(f"{found}; expected ({heads},)")
