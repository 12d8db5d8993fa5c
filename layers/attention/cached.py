"""Attention to cached tokens, in generation."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels.attention.flash_attention import attention_weights
from liger_models.layers.attention.backends import slopes_of
from liger_models.layers.attention.fused import grouped_attention
from liger_models.layers.specs import AttentionSpec


def attend_cached(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    mask: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the new tokens of each sequence to its cached tokens, which include the new ones.

    Args:
        q: [batch * new, num_attention_heads, head_dim]; keys, values: [batch, longest, num_key_value_heads,
            head_dim], or values with heads of another size.
        spec: the scale and the soft cap; `mask` accounts for window and chunks.
        mask: [batch, new, longest] bool, true for the keys that a token attends to, at least one each; or
            [batch, groups, new, longest], for groups of as many heads each.
        sinks: [num_attention_heads], if the spec has them.

    Returns:
        [batch * new, num_attention_heads, the size of the values' heads].
    """
    q = q.unflatten(0, (len(mask), -1)).transpose(1, 2)  # [batch, heads, new, dim]
    if mask.dim() == 4:
        mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], dim=1)
    else:
        mask = mask[:, None]
    keys, values, mask = keys.transpose(1, 2), values.transpose(1, 2), mask.to(q.device)
    if spec.softcap is None and not spec.sinks and spec.slopes is None:
        out = grouped_attention(q, keys, values, spec, mask)
    else:
        groups = (spec.num_key_value_heads, -1)
        new = q.shape[2]
        scores = (q.unflatten(1, groups).flatten(2, 3) @ keys.mT * spec.scale).unflatten(2, (-1, new))
        slopes = slopes_of(spec, q.device)
        # The same as by distance: the softmax ignores what is added to all scores of a query.
        before_last = torch.arange(1 - keys.shape[2], 1, device=q.device)
        bias = None if slopes is None else slopes[:, None, None] * before_last
        weights = attention_weights(scores.flatten(1, 2), mask, spec.softcap, sinks, bias)
        weights = torch.dropout(weights, spec.dropout, train=True) if spec.dropout else weights
        out = (weights.unflatten(1, groups).flatten(2, 3) @ values).unflatten(2, (-1, new)).flatten(1, 2)
    return out.transpose(1, 2).flatten(0, 1)
