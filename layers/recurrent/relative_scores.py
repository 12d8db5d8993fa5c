"""Causal attention whose scores have a learned bias by distance (Inkling, 2026).

    score(i, j) = scale * q_i k_j + (r_i P)[i - j]      for j <= i, i - j < window; 0 <= i - j < E in the bias

r_i is a short vector of each query and head, and P [R, E] holds profiles over distances, which all heads
share. Beyond E the bias is zero.

Queries run in blocks of one document, each attending to the keys that it sees, forward and again backward, so
the biases of one block exist at a time and only q, k, v, r and P are kept. A block's product is torch's own
with a bias. It takes the memory-efficient kernel on a GPU, and costs one more forward pass than kernels that
keep their sums; keys and values are copied for each query head.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable
from liger_models.layers.attention.fused import biased_attention
from liger_models.layers.recompute.eager import not_compiled

_SCORES = 1 << 26  # of a block, over all heads
_QUERIES = 256  # of a block, at most


@not_compiled
def attend_with_distances(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    profiles: Tensor,
    scale: float,
    window: int | None,
    boundaries: list[int],
) -> Tensor:
    """Attention over packed documents.

    Args:
        q: [T, heads, dim]; k, v: [T, kv_heads, dim].
        r: [T, heads, R].
        profiles: [R, E].
        scale: factor of the products of queries and keys.
        window: number of visible tokens, the query's own included; None: all before it.
        boundaries: of the documents, from 0 to T.

    Returns:
        [T, heads, dim] in q's dtype.
    """
    return _Attend.apply(q, k, v, r, profiles, scale, window, boundaries)


def biases_by_distance(r: Tensor, profiles: Tensor, distances: Tensor, mask: Tensor) -> Tensor:
    """The biases of cached keys.

    Args:
        r: [batch, heads, queries, R].
        profiles: [R, E].
        distances: [batch or 1, queries, keys], from each key to each query.
        mask: [batch, queries, keys] bool, the keys that a query sees.

    Returns:
        [batch, heads, queries, keys] in r's dtype, -inf for other keys.
    """
    extent = profiles.shape[1]
    by_distance = at_least_float32(r) @ at_least_float32(profiles)  # [batch, heads, queries, E]
    distances, mask = distances[:, None], mask[:, None]
    places = distances.clamp(0, extent - 1).expand(*by_distance.shape[:3], -1)
    biases = by_distance.gather(-1, places).masked_fill(distances >= extent, 0.0)
    return biases.masked_fill(~mask, -torch.inf).to(r.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        profiles: Tensor,
        scale: float,
        window: int | None,
        boundaries: list[int],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, r, profiles)
        ctx.settings = scale, window, boundaries
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for own, seen in _blocks(q.shape[1], window, boundaries):
            out[own] = _attended(q[own], k[seen], v[seen], r[own], profiles, scale, window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, r, profiles = ctx.saved_tensors
        scale, window, boundaries = ctx.settings
        dq, dr = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, r))
        # Sums over blocks of queries.
        dk, dv, dprofiles = (torch.zeros_like(at_least_float32(x)) for x in (k, v, profiles))
        for own, seen in _blocks(q.shape[1], window, boundaries):
            operands = q[own], k[seen], v[seen], r[own], profiles
            a, b, c, d, e = (x.detach().requires_grad_() for x in operands)
            with torch.enable_grad():
                out = _attended(a, b, c, d, e, scale, window)
            gradients = torch.autograd.grad(out, (a, b, c, d, e), dout[own])
            dq[own], of_keys, of_values, dr[own], of_profiles = gradients
            dk[seen] += of_keys
            dv[seen] += of_values
            dprofiles += of_profiles
        return dq, dk.to(k.dtype), dv.to(v.dtype), dr, dprofiles.to(profiles.dtype), None, None, None


def _blocks(heads: int, window: int | None, boundaries: list[int]) -> Iterator[tuple[slice, slice]]:
    """Queries of each block, and the keys that they see, which end with the last query's own."""
    for start, end in pairwise(boundaries):
        first = start
        while first < end:
            keys = first - start if window is None else min(first - start, window - 1)
            count = max(1, min(end - first, _QUERIES, _SCORES // (heads * (keys + 1))))
            yield slice(first, first + count), slice(first - keys, first + count)
            first += count


def _attended(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, profiles: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention of q [n, heads, dim] to the keys k, v [m, kv_heads, dim], the last n of which are its own."""
    biases = _biases(r.transpose(0, 1), profiles, len(k), window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return biased_attention(q, k, v, biases[None], scale)[0].transpose(0, 1)


def _biases(r: Tensor, profiles: Tensor, keys: int, window: int | None) -> Tensor:
    """r [heads, n, R] -> the biases [heads, n, keys] of the keys up to the last query's own."""
    queries, farthest = r.shape[1], min(profiles.shape[1], keys)
    # From the farthest distance to zero, and then zeros. The row of each query begins one key later.
    rows = at_least_float32(r) @ at_least_float32(profiles)[:, :farthest].flip(1)
    width = farthest + queries - 1
    rows = F.pad(rows, (0, queries)).flatten(1)[:, : queries * width].unflatten(1, (queries, width))
    biases = F.pad(rows, (keys - width, 0))  # or without distances beyond the first key
    key = torch.arange(keys, device=r.device)
    query = key[keys - queries :, None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    return biases.masked_fill(hidden, -torch.inf).to(r.dtype)
