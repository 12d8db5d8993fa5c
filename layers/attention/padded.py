"""Attention within rows that keep their padding."""

from __future__ import annotations

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
    limited = spec.causal or spec.window is not None or spec.chunk is not None
    if limited or not spec.is_plain_softmax or visibility.documents.cu_seqlens is not None:
        raise ValueError("rows with padding need attention that is not causal, without window or chunk")
    by_mask = spec.dropout > 0 or (q.is_cuda and q.dtype == torch.float32)  # which takes a mask of all rows
    if use_triton(q) and not by_mask:
        return attention(q, k, v, scale=spec.scale, bounds=visibility.ranges_with_padding())
    pads = visibility.padding.view(visibility.documents.shape)
    mask = ~(pads[:, None, :, None] & pads[:, None, None, :])
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return grouped_attention(q, k, v, spec, mask).transpose(1, 2).flatten(0, 1)
