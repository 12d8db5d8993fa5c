"""The delta rule token by token, in plain PyTorch, and the checks of its operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32

L2_EPS = 1e-6


def recurrence(
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: tuple[Tensor, ...],
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence; return the outputs of all tokens and the final states of all documents.

    Args:
        step: `step(*operands, state)` returns a token's output and the next state.
        tokens: q, k, v and the gates, each [T, ...].
        cu_seqlens: [documents + 1], or None for one document.
        state: [documents, heads, dk, dv], or None for zeros.
    """
    q, _, v, *_ = tokens
    bounds = [0, len(q)] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [v[:0]], []
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        if state is None:
            s = at_least_float32(v.new_zeros(1, v.shape[1], q.shape[2], v.shape[2]))
        else:
            s = at_least_float32(state[document : document + 1])
        for t in range(first, end):
            o, s = step(*(x[t : t + 1] for x in tokens), s)
            outputs.append(o)
        finals.append(s)
    return torch.cat(outputs), torch.cat(finals)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Process one token of every sequence. decay: [sequences, heads, dk or 1], not a logarithm."""
    repeats = v.shape[1] // q.shape[1]
    queries, keys = (_normalised(x).repeat_interleave(repeats, 1) for x in (q, k))
    state = state * decay[..., None]
    read = (state * keys[..., None]).sum(2)
    state = state + keys[..., None] * (beta[..., None] * (at_least_float32(v) - read))[:, :, None]
    o = (state * queries[..., None]).sum(2) * q.shape[2] ** -0.5
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
