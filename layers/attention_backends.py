"""The attention product itself, and which implementation computes it.

    out = softmax(scale * q k^T, over the tokens that the query may see) v

A query sees the tokens of its own document up to itself, and of those the last `window` if there is a window.

| backend  | does                       | what it is                                                       |
|----------|----------------------------|------------------------------------------------------------------|
| `sdpa`   | equal documents, no window | torch's scaled_dot_product_attention, cuDNN first, never a mask  |
| `varlen` | all, on a GPU, 16 bits     | torch.nn.attention.varlen (FlashAttention 2)                     |
| `masked` | all, with memory T^2       | scaled_dot_product_attention with a mask: CPU, float32 on a GPU  |
| `eager`  | all, with memory T^2 heads | the plain twin: the formula above                                |

`auto` takes the first row of the table that can do what is asked.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import AttentionSpec

AttentionBackend = Literal["auto", "sdpa", "varlen", "masked", "eager"]
BACKENDS: tuple[AttentionBackend, ...] = ("auto", "sdpa", "varlen", "masked", "eager")

_UNMASKED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# cuDNN's backward has given NaN with a mask for some lengths, so it is not asked.
_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Causal attention over packed documents.

    Args:
        q: [T, num_attention_heads, head_dim]; k, v: [T, num_key_value_heads, head_dim]; any strides.
        spec: scale and window.
        sequences: the documents.
        backend: a row of the table above, or "auto".

    Returns:
        [T, num_attention_heads, head_dim].

    Raises:
        ValueError: the named backend cannot do what is asked, or is unknown.
    """
    if backend == "auto":
        backend = _choose(q, spec, sequences)
    if backend == "sdpa":
        return _sdpa(q, k, v, spec, sequences)
    if backend == "varlen":
        return _varlen(q, k, v, spec, sequences)
    if backend == "masked":
        return _masked(q, k, v, spec, sequences)
    if backend == "eager":
        return attend_plain(q, k, v, spec, sequences)
    raise ValueError(f"unknown attention backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def attend_plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> Tensor:
    """The plain twin of `attend`."""
    k, v = (x.repeat_interleave(spec.num_attention_heads // spec.num_key_value_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    scores = scores.masked_fill(~visible(sequences, spec.window), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


def visible(sequences: Sequences, window: int | None) -> Tensor:
    """Which key (column) each query (row) sees: [T, T] bool."""
    index = torch.arange(sequences.num_tokens, device=sequences.device)
    distance = index[:, None] - index[None, :]
    if sequences.cu_seqlens is None:
        document = index // sequences.max_seqlen
    else:
        document = torch.bucketize(index, sequences.cu_seqlens[1:], right=True)
    sees = (distance >= 0) & (document[:, None] == document[None, :])
    return sees if window is None else sees & (distance < window)


def attend_cached(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, slots: Tensor) -> Tensor:
    """One new token a sequence against everything that its sequence holds.

    Args:
        q: [batch, num_attention_heads, head_dim]; keys, values: [batch, longest, num_key_value_heads,
            head_dim].
        slots: [batch], the new token's own place among the keys.

    Returns:
        [batch, num_attention_heads, head_dim].
    """
    place = torch.arange(keys.shape[1], device=q.device)
    sees = place <= slots[:, None]
    if spec.window is not None:
        sees &= place > slots[:, None] - spec.window
    out = _grouped_sdpa(
        q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), spec, sees[:, None, None]
    )
    return out[:, :, 0]


def _choose(q: Tensor, spec: AttentionSpec, sequences: Sequences) -> AttentionBackend:
    if _is_plain_causal(spec, sequences):
        return "sdpa"
    fast = (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and spec.head_dim <= 256
        and spec.head_dim % 8 == 0
    )
    return "varlen" if fast else "masked"


def _is_plain_causal(spec: AttentionSpec, sequences: Sequences) -> bool:
    return sequences.cu_seqlens is None and (spec.window is None or spec.window >= sequences.max_seqlen)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> Tensor:
    if not _is_plain_causal(spec, sequences):
        raise ValueError(
            "attention='sdpa' has neither packed documents, padding nor windows; use 'auto' or 'varlen'"
        )
    # Views all the way: [T, heads, dim] -> [batch, heads, seq, dim] without a copy, also out of a packed
    # q|k|v row.
    q, k, v = (x.unflatten(0, sequences.shape).transpose(1, 2) for x in (q, k, v))
    if q.is_cuda and not torch.compiler.is_compiling():
        with sdpa_kernel(_UNMASKED, set_priority=True):
            out = _grouped_sdpa(q, k, v, spec, None)
    else:
        out = _grouped_sdpa(q, k, v, spec, None)
    return out.transpose(1, 2).flatten(0, 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> Tensor:
    mask = visible(sequences, spec.window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.is_cuda and not torch.compiler.is_compiling():
        with sdpa_kernel(_MASKED):
            out = _grouped_sdpa(q, k, v, spec, mask)
    else:
        out = _grouped_sdpa(q, k, v, spec, mask)
    return out[0].transpose(0, 1)


def _grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """q [batch, heads, queries, dim]; k, v [batch, kv_heads, keys, dim]."""
    groups = spec.num_attention_heads // spec.num_key_value_heads
    if groups > 1 and (mask is not None or q.dtype == torch.float32):
        # The kernels that take a mask, or float32, do not know grouped heads, and the fallback would keep all
        # the scores.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=groups > 1
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu = sequences.cu_seqlens
    if cu is None:
        batch, seq = sequences.shape
        cu = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=q.device)
    longest = sequences.max_seqlen
    before = -1 if spec.window is None else spec.window - 1
    options: dict[str, Any] = {"enable_gqa": True} if _varlen_takes_gqa_flag() else {}
    # Its backward reads dense rows of heads; the packed q|k|v row gives them a common stride, which it also
    # takes.
    return varlen_attn(  # type: ignore[return-value]  # one tensor: lse is not asked for
        q, k, v, cu, cu, longest, longest, scale=spec.scale, window_size=(before, 0), **options
    )


@functools.cache
def _varlen_takes_gqa_flag() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
