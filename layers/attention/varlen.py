"""torch's attention for packed documents, FlashAttention 2, for a GPU and 16 bits."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    """Attention of packed documents, with a window and without spans.

    Raises:
        ValueError: spans in causal attention.
    """
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = visibility.documents.boundaries(), visibility.documents.max_seqlen
    if visibility.spans is not None and spec.causal:
        raise ValueError("attention='varlen' does not support spans; use 'auto' or 'triton'")
    left = -1 if spec.window is None else spec.window - 1
    right = 0 if spec.causal else left
    options: dict[str, Any] = {"enable_gqa": True} if _varlen_takes_gqa_flag() else {}
    # Its backward reads dense rows of heads; the packed q|k|v row gives them a common stride, which it also
    # takes.
    return varlen_attn(  # type: ignore[return-value]  # one tensor: lse is not asked for
        q, k, v, cu, cu, longest, longest, scale=spec.scale, window_size=(left, right), **options
    )


@functools.cache
def _varlen_takes_gqa_flag() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
