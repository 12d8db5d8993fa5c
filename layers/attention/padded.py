"""Attention within rows that keep their padding, or where the last tokens of documents are hidden."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from liger_models.kernels import attention
from liger_models.kernels._dispatch import use_triton
from liger_models.layers.attention.fused import grouped_attention
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec


def attend_with_padding(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility
) -> Tensor:
    """Attention within rows that keep padding at their end: all tokens attend to one another, except padding
    to padding.
    """
    assert visibility.padding is not None
    if _is_limited(spec) or visibility.documents.cu_seqlens is not None:
        raise ValueError("rows with padding need attention that is not causal, without window or chunk")
    if use_triton(q) and not _by_torch(q, spec):
        return attention(q, k, v, scale=spec.scale, bounds=visibility.ranges_with_padding())
    pads = visibility.padding.view(visibility.documents.shape)
    mask = ~(pads[:, None, :, None] & pads[:, None, None, :])
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return grouped_attention(q, k, v, spec, mask).transpose(1, 2).flatten(0, 1)


def attend_to_shown(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    """Attention of all tokens of a document to all but its `hidden` last ones."""
    assert visibility.hidden is not None
    if _is_limited(spec):
        raise ValueError("hidden tokens need attention that is not causal, without window or chunk")
    if use_triton(q) and not _by_torch(q, spec):
        return attention(q, k, v, scale=spec.scale, bounds=visibility.ranges_without_hidden())
    made = []
    bounds = pairwise(visibility.documents.host_boundaries())
    for (start, end), hidden in zip(bounds, visibility.hidden, strict=True):
        shown = end - hidden
        pieces = q[start:end], k[start:shown], v[start:shown]
        own = [x[None].transpose(1, 2) for x in pieces]
        made.append(grouped_attention(own[0], own[1], own[2], spec, None).transpose(1, 2)[0])
    return torch.cat(made)


def _is_limited(spec: AttentionSpec) -> bool:
    limited = spec.causal or spec.window is not None or spec.chunk is not None
    return limited or not spec.is_plain_softmax


def _by_torch(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether a GPU leaves the product to torch, which takes a mask, or one document at a time."""
    return spec.dropout > 0 or (q.is_cuda and q.dtype == torch.float32)
