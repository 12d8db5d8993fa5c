"""torch's attention for packed documents, FlashAttention 2, for a GPU and 16 bits."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention, is_flash_attention_available

from liger_models.layers.attention.reach import attend_in_parts, is_within_reach
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    """Attention of packed documents, with a window and without spans.

    Some heads at a time if there are more elements than the kernel addresses (`reach.py`).

    Raises:
        ValueError: spans in causal attention, or one head has too many elements.
    """
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = visibility.documents.boundaries(), visibility.documents.max_seqlen
    if visibility.spans is not None and spec.causal:
        raise ValueError("attention='varlen' does not support spans; use 'auto' or 'triton'")
    left = -1 if spec.window is None else spec.window - 1
    right = 0 if spec.causal else left
    options: dict[str, Any] = {"enable_gqa": True} if _varlen_takes_gqa_flag() else {}
    options |= {"scale": spec.scale, "window_size": (left, right)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [1, heads, T, dim]
        # Its backward reads dense rows of heads; the packed q|k|v row gives them a common stride, which it
        # also takes.
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = varlen_attn(q, k, v, cu, cu, longest, longest, **options)
        return out.transpose(0, 1)[None]  # type: ignore[union-attr]  # one tensor: lse is not asked for

    # Each document's rows of the float32 sums are rounded up.
    padded = 128 * (len(cu) - 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    whole = is_within_reach(q, v, more=padded)
    out = attend(q, k, v) if whole else attend_in_parts(attend, q, k, v, more=padded)
    return out[0].transpose(0, 1)


@functools.cache
def _varlen_takes_gqa_flag() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def has_varlen(device: torch.device) -> bool:
    """Whether torch has this kernel for a GPU. For ROCm it depends on the architecture, too."""
    return _BUILT if torch.version.hip is None else _runs_on(device.index)


_BUILT = is_flash_attention_available()


@functools.cache
def _runs_on(index: int | None) -> bool:
    device = torch.device("cuda" if index is None else f"cuda:{index}")
    like = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return can_use_flash_attention(SDPAParams(like, like, like, None, 0.0, True, False))


if torch.version.hip is not None:  # elsewhere nobody needs torch._dynamo, which this imports
    _runs_on = torch.compiler.assume_constant_result(_runs_on)
