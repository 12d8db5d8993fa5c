"""Delta rule with a decay for each key channel (Kimi Delta Attention; Kimi Team, 2025, arXiv:2510.26692).

For every head, with a state S [dk, dv] that starts at zero in each document:

    g_t    = -exp(A_log) * softplus(f_t + dt_bias)                     logarithms of the decays, [dk]
             or lower_bound * sigmoid(exp(A_log) * (f_t + dt_bias))    with a lower bound
    beta_t = beta_scale * sigmoid(b_t)
    q_t, k_t  normalised to length one; q_t also times dk^-1/2
    S     <- diag(exp(g_t)) S
    S     <- S + k_t (beta_t (v_t - S^T k_t))^T
    o_t    = S^T q_t

Everything is computed in float32 except the operands of matrix products, which are rounded to q's dtype.

Training works on chunks of 64 tokens (`_channel_chunks.py` has the kernels and their formulas), for gates of
any size: no exponent is positive. Documents never share a chunk. Only the operands are kept for the backward
pass; states, of dk x dv for each chunk and head, are computed again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import as_once_differentiable, at_least_float32
from liger_models.kernels.recurrent._channel_chunks import ChannelDeltaRule
from liger_models.kernels.recurrent._chunk_table import ChunkTables, chunk_table, use_chunks
from liger_models.kernels.recurrent._recurrence import L2_EPS, check_heads, delta_rule, delta_step


def channel_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    tables: ChunkTables | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule with a decay for each key channel, over packed documents.

    Args:
        q, k: [T, heads, dk], float dtype, not normalised; dk at most 128.
        v: [T, heads, dv] in q's dtype; dv at most 256.
        f: [T, heads, dk], the decay before its function.
        b: [T, heads], the learning rate before its sigmoid.
        A_log: [heads].
        dt_bias: [heads, dk].
        lower_bound: the least g of a token, such as -5.0, with a sigmoid in place of the softplus; None for
            the unbounded form.
        beta_scale: 2.0 lets a state's eigenvalues be negative.
        cu_seqlens: [documents + 1] integers that rise from 0 to T; None for one document.
        state: [documents, heads, dk, dv] float32, the states to continue from; None for zeros.
        tables: of the same documents, to find their chunks once for several calls; None: they are found here.

    Returns:
        o [T, heads, dv] in v's dtype, and the final state of every document, shaped as `state`; float64 for
        float64 operands. Gradients flow through both. Running it again gives the same bits.

        On a GPU, float32 with dk or dv above 64 runs token by token, which is slow.

    Raises:
        ValueError: shapes or dtypes that do not fit, a lower bound that is not negative, or tensors on
            several devices.
    """
    _check(q, k, v, f, b, A_log, dt_bias, lower_bound, cu_seqlens, state)
    if use_chunks(q, v, k, f, b, A_log, dt_bias, state):
        table = chunk_table(cu_seqlens, q.shape[0], q.device, v.shape[1], tables)
        return ChannelDeltaRule.apply(
            q, k, v, f, b, A_log, dt_bias, state, table, lower_bound, beta_scale, L2_EPS
        )
    return as_once_differentiable(
        *channel_delta_rule_plain(q, k, v, f, b, A_log, dt_bias, lower_bound, beta_scale, cu_seqlens, state)
    )


def channel_delta_rule_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `channel_delta_rule`, token by token."""
    return delta_rule(q, k, v, *_gates(f, b, A_log, dt_bias, lower_bound, beta_scale), cu_seqlens, state)


def channel_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Process one further token of every sequence, for decoding.

    Args:
        q, k, v, f, b: as in `channel_delta_rule`, with sequences in place of tokens.
        A_log, dt_bias, lower_bound, beta_scale: as in `channel_delta_rule`.
        state: [sequences, heads, dk, dv] float32.

    Returns:
        o [sequences, heads, dv] in v's dtype, and the new state, a new tensor.
    """
    return delta_step(q, k, v, *_gates(f, b, A_log, dt_bias, lower_bound, beta_scale), state)


def _gates(
    f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, beta_scale: float
) -> tuple[Tensor, Tensor]:
    """Return decay [T, heads, dk] and beta [T, heads]."""
    raw = at_least_float32(f) + dt_bias
    rate = at_least_float32(A_log).exp()[:, None]
    g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    return g.exp(), beta_scale * torch.sigmoid(at_least_float32(b))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> None:
    check_heads(q, k, v, cu_seqlens, state, widest_key=128)
    if v.shape[1] != q.shape[1]:
        raise ValueError(f"there are {v.shape[1]} value heads and {q.shape[1]} key heads; expected the same")
    if f.shape != q.shape or b.shape != v.shape[:2]:
        found = f"f is {tuple(f.shape)}, b {tuple(b.shape)}"
        raise ValueError(f"{found}; expected {tuple(q.shape)} and {tuple(v.shape[:2])}")
    if A_log.shape != q.shape[1:2] or dt_bias.shape != q.shape[1:]:
        found = f"A_log is {tuple(A_log.shape)}, dt_bias {tuple(dt_bias.shape)}"
        raise ValueError(f"{found}; expected {tuple(q.shape[1:2])} and {tuple(q.shape[1:])}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}; expected a negative number, or None")
