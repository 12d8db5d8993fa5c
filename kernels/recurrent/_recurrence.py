"""The delta rule token by token, in plain PyTorch, and the checks of its operands."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32

L2_EPS = 1e-6


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; return the outputs of all tokens and the final states of all documents.

    Args:
        q, k, v: [T, heads, dk or dv].
        decay: [T, heads, dk or 1], not a logarithm.
        beta: [T, heads].
        cu_seqlens: [documents + 1], or None for one document.
        state: [documents, heads, dk, dv], or None for zeros.
    """
    # Each `split` has one backward pass; a slice of each token would add to gradients of all tokens.
    queries, keys = _queries_and_keys(q, k, v)
    tokens = list(zip(*(x.split(1) for x in (queries, keys, v, decay, beta)), strict=True))
    bounds = [0, len(q)] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [v[:0]], []
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        if state is None:
            s = at_least_float32(v.new_zeros(1, v.shape[1], q.shape[2], v.shape[2]))
        else:
            s = at_least_float32(state[document : document + 1])
        for token in tokens[first:end]:
            o, s = _step(s, *token)
            outputs.append(o)
        finals.append(s)
    return torch.cat(outputs), torch.cat(finals)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Process one token of every sequence. decay: [sequences, heads, dk or 1], not a logarithm."""
    return _step(state, *_queries_and_keys(q, k, v), v, decay, beta)


def _queries_and_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return normalised queries and keys of every head of values."""
    repeats = v.shape[1] // q.shape[1]
    queries, keys = (_normalised(x).repeat_interleave(repeats, 1) for x in (q, k))
    return queries, keys


def _step(
    state: Tensor, queries: Tensor, keys: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    state = state * decay[..., None]
    read = (state * keys[..., None]).sum(2)
    state = state + keys[..., None] * (beta[..., None] * (at_least_float32(v) - read))[:, :, None]
    o = (state * queries[..., None]).sum(2) * queries.shape[2] ** -0.5
    return o.to(v.dtype), state


def _normalised(x: Tensor) -> Tensor:
    wide = at_least_float32(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def check_heads(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, state: Tensor | None, widest_key: int
) -> None:
    """Raise ValueError unless the heads of q, k, v and the state of a delta rule are consistent."""
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or len(v) != len(q):
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "expected [T, key_heads, dk] twice and [T, value_heads, dv]"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; expected one dtype")
    if q.shape[2] > widest_key or v.shape[2] > 256:
        found = f"key heads are {q.shape[2]} wide and value heads {v.shape[2]}"
        raise ValueError(f"{found}; expected at most {widest_key} and 256")
    if state is not None:
        documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        expected = documents, v.shape[1], q.shape[2], v.shape[2]
        if state.shape != expected:
            raise ValueError(f"state is {tuple(state.shape)}; expected {expected}")
