"""The attention product itself, and which implementation computes it.

    out = softmax(cap(scale * q k^T), over the tokens that the query may see, and its head's sink) v

A query sees the tokens of its own document up to itself, and of those the last `window` if there is a window.
Where the spec is not causal it sees all of its document, and where there are spans (of an image, say) all of
its span beside what precedes it.
Documents that the spec cuts into chunks are shorter documents, for every backend. Where documents continue
others (layers/sequences/tree.py), a query sees of those what it would see if they stood before its own.
Soft cap and sinks: see kernels/attention/flash_attention.py.

| backend  | does                                 | what it is                                            |
|----------|--------------------------------------|-------------------------------------------------------|
| `sdpa`   | equal documents without a window     | torch's own kernels, cuDNN first: fused.py            |
| `varlen` | documents, windows; a GPU, 16 bits   | torch.nn.attention.varlen (FlashAttention 2)          |
| `flash`  | causal, no soft cap; Hopper, 16 bits | FlashAttention 4, if asked for: flash.py              |
| `triton` | all, in heads of up to 512           | our own kernel: kernels/attention/                    |
| `masked` | documents, windows; memory T^2       | torch's own kernels with a mask: fused.py             |
| `eager`  | all; memory T^2 heads                | the plain twin: the formula above                     |

`auto` chooses, of those that can do what is asked:

| asked for                   | GPU      | elsewhere |
|-----------------------------|----------|-----------|
| equal documents, no window  | `sdpa`   | `sdpa`    |
| packed, a window, spans     | `triton` | `masked`  |
| that continue others        | `triton` | `masked`  |
| soft cap or sinks           | `triton` | `eager`   |

Elsewhere is a CPU, float64, heads of more than 512, float32 where attention is not plainly causal (documents
that continue others, spans, encoders), and torch.compile, under which `triton` would run its twin; there
`varlen` goes before `masked` on a GPU in 16 bits, for heads of up to 256 that are multiples of 8.
Values may be narrower or wider than keys, but for `varlen`. For such heads, and those of more than 256, a GPU
takes `triton` in place of `sdpa` where torch has no kernel of cuDNN's: the others keep all scores, or copy
keys and values for every query head.
On a CPU `masked` and `eager` take packed documents one by one, and T is a document's length.

What each takes, and what else was tried, is in docs/benchmarks.md.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from liger_models.kernels import KeyRanges, attention
from liger_models.kernels._dispatch import use_triton
from liger_models.kernels.attention.flash_attention import (
    MOST_HEAD_DIM,
    attention_plain,
    attention_weights,
)
from liger_models.kernels.attention.visible_keys import visible_keys
from liger_models.layers.attention.flash import flash_attention
from liger_models.layers.attention.fused import cudnn_takes, masked_attention, unmasked_attention
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec

AttentionBackend = Literal["auto", "sdpa", "varlen", "flash", "triton", "masked", "eager"]
BACKENDS: tuple[AttentionBackend, ...] = ("auto", "sdpa", "varlen", "flash", "triton", "masked", "eager")

WITH_TREES = ("triton", "masked", "eager")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    backend: AttentionBackend = "auto",
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over packed documents.

    Args:
        q: [T, num_attention_heads, head_dim]; k: [T, num_key_value_heads, head_dim]; v: the same, or with
            heads of another size; any strides.
        spec: scale, window, chunk and soft cap.
        sequences: the documents. Where they are divided over ranks, q, k and v are those of this rank's
            tokens, and heads are exchanged: layers/sequences/sequence_parallel.py.
        backend: a row of the table above, or "auto".
        sinks: [num_attention_heads], if the spec has them.

    Returns:
        [T, num_attention_heads, the size of v's heads].

    Raises:
        ValueError: the named backend cannot do what is asked, or is unknown.
    """
    if spec.sinks != (sinks is not None):
        given = "no sinks" if sinks is None else "sinks"
        raise ValueError(f"got {given}, but the spec says sinks={spec.sinks}")
    if sequences.slice is not None:
        own, own_sinks = sequences.slice.own_heads(spec, sinks)
        q, k, v = sequences.slice.to_heads(q, k, v)
        return sequences.slice.to_tokens(_attend(q, k, v, own, sequences.visibility, backend, own_sinks))
    return _attend(q, k, v, spec, sequences.visibility, backend, sinks)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    backend: AttentionBackend,
    sinks: Tensor | None,
) -> Tensor:
    if visibility.padding is not None:
        return _with_padding(q, k, v, spec, visibility)
    visibility = _as_seen(spec, visibility)
    if backend == "auto":
        backend = _choose(q, k, v, spec, visibility)
    if visibility.documents.tree is not None and backend not in WITH_TREES:
        raise ValueError(
            f"attention={backend!r} has no documents that continue others; use 'auto' or 'triton'"
        )
    if backend in ("masked", "eager") and _boundaries_are_at_hand(q, visibility):
        return _one_by_one(q, k, v, spec, visibility, backend, sinks)
    if backend == "triton":
        return _triton(q, k, v, spec, visibility, sinks)
    if backend == "flash":
        return flash_attention(q, k, v, spec, visibility, sinks)
    if backend == "eager":
        return _plain(q, k, v, spec, visibility, sinks)
    if backend not in ("sdpa", "varlen", "masked"):
        raise ValueError(f"unknown attention backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if not _is_plain_softmax(spec):
        raise ValueError(f"attention={backend!r} has neither soft cap nor sinks; use 'auto' or 'triton'")
    if backend == "sdpa":
        return _sdpa(q, k, v, spec, visibility)
    if backend == "varlen":
        return _varlen(q, k, v, spec, visibility)
    return _masked(q, k, v, spec, visibility)


def attend_by_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    backend: AttentionBackend = "auto",
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """`attend`, its heads in pieces that lie side by side: of long sequences the heads of one key head at a
    time, where this spares memory. The backward pass of `sdpa` sums the queries' gradients in float32, and
    makes keys and values as many as there are queries: 4 times what they take, if all heads run at once.
    """
    groups = spec.num_key_value_heads
    if sequences.slice is None and len(q) > LONG and groups > 1:
        if backend == "auto":
            backend = _choose(q, k, v, spec, _as_seen(spec, sequences.visibility))
        if backend == "sdpa":
            heads = spec.num_attention_heads // groups
            one = replace(spec, num_attention_heads=heads, num_key_value_heads=1)
            parts = zip(q.split(heads, dim=1), k.split(1, dim=1), v.split(1, dim=1), strict=True)
            return [attend(*part, one, sequences, backend) for part in parts]
    return [attend(q, k, v, spec, sequences, backend, sinks)]


LONG = 1 << 16  # tokens: of these four heads are work enough for a GPU


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences, sinks: Tensor | None = None
) -> Tensor:
    """The plain twin of `attend`."""
    return _plain(q, k, v, spec, _as_seen(spec, sequences.visibility), sinks)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility, sinks: Tensor | None
) -> Tensor:
    bounds, window = _bounds(spec, visibility)
    return attention_plain(q, k, v, spec.scale, bounds, window, spec.softcap, sinks)


def _bounds(spec: AttentionSpec, visibility: Visibility) -> tuple[Tensor | KeyRanges | None, int | None]:
    """What `kernels.attention` takes as bounds and window."""
    if not _by_ranges(spec, visibility):
        return visibility.documents.bounds(), spec.window
    if visibility.documents.tree is not None and spec.causal:
        return visibility.documents.tree.key_ranges(spec.window, spec.chunk, visibility.spans), None
    return visibility.key_ranges(spec.window, spec.causal, spec.whole_spans), None


def _by_ranges(spec: AttentionSpec, visibility: Visibility) -> bool:
    """Whether what is seen is more than documents and a window say."""
    return not spec.causal or visibility.spans is not None or visibility.documents.tree is not None


def visible(spec: AttentionSpec, visibility: Visibility) -> Tensor:
    """Which key (column) each query (row) sees: [T, T] bool."""
    documents = visibility.documents
    return visible_keys(documents.num_tokens, *_bounds(spec, visibility), documents.device)


def attend_cached(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    sees: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """The new tokens of each sequence against what its cache holds, themselves included.

    Args:
        q: [batch * new, num_attention_heads, head_dim]; keys, values: [batch, longest, num_key_value_heads,
            head_dim], or values with heads of another size.
        spec: the scale and the soft cap; a window and chunks are in `sees`.
        sees: [batch, new, longest] bool. Every token sees at least one.
        sinks: [num_attention_heads], if the spec has them.

    Returns:
        [batch * new, num_attention_heads, the size of the values' heads].
    """
    q = q.unflatten(0, sees.shape[:2]).transpose(1, 2)  # [batch, heads, new, dim]
    keys, values, sees = keys.transpose(1, 2), values.transpose(1, 2), sees[:, None].to(q.device)
    if _is_plain_softmax(spec):
        out = _grouped_sdpa(q, keys, values, spec, sees)
    else:
        groups = (spec.num_key_value_heads, -1)
        new = q.shape[2]
        scores = (q.unflatten(1, groups).flatten(2, 3) @ keys.mT * spec.scale).unflatten(2, (-1, new))
        weights = attention_weights(scores.flatten(1, 2), sees, spec.softcap, sinks)
        out = (weights.unflatten(1, groups).flatten(2, 3) @ values).unflatten(2, (-1, new)).flatten(1, 2)
    return out.transpose(1, 2).flatten(0, 1)


def _as_seen(spec: AttentionSpec, visibility: Visibility) -> Visibility:
    visibility = visibility if spec.sees_spans else visibility.without_spans()
    return (
        visibility
        if spec.chunk is None or visibility.documents.tree is not None
        else visibility.chunks(spec.chunk)
    )


def _choose(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> AttentionBackend:
    plain = _is_plain_softmax(spec)
    ours = use_triton(q) and max(q.shape[-1], v.shape[-1]) <= MOST_HEAD_DIM
    if q.dtype == torch.float32 and _by_ranges(spec, visibility):
        ours = False  # in float32 the kernel has not been timed beside a mask
    if visibility.documents.tree is not None:
        return "triton" if ours else "masked" if plain else "eager"
    usual = q.shape[-1] == v.shape[-1] <= 256
    if (
        plain
        and _is_unmasked(spec, visibility)
        and (usual or not ours or _cudnn_takes(q, k, v, spec, visibility))
    ):
        return "sdpa"
    if ours:
        return "triton"
    flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    if plain:
        return "varlen" if flash and usual and visibility.spans is None else "masked"
    return "eager"


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> bool:
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return cudnn_takes(q, k, v, spec.causal)


def _is_plain_softmax(spec: AttentionSpec) -> bool:
    return spec.softcap is None and not spec.sinks


def _is_unmasked(spec: AttentionSpec, visibility: Visibility) -> bool:
    """Whether documents are equal, and nothing but causality hides anything of them."""
    all_of_it = spec.window is None or spec.window >= visibility.documents.max_seqlen
    return (
        visibility.documents.cu_seqlens is None
        and all_of_it
        and (visibility.spans is None or not spec.causal)
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    if not _is_unmasked(spec, visibility):
        raise ValueError(
            "attention='sdpa' has neither packed documents, padding, windows nor spans; use 'auto' or "
            "'triton'"
        )
    # Views all the way: [T, heads, dim] -> [batch, heads, seq, dim] without a copy, also out of a packed
    # q|k|v row.
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return _grouped_sdpa(q, k, v, spec, None).transpose(1, 2).flatten(0, 1)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility, sinks: Tensor | None
) -> Tensor:
    bounds, window = _bounds(spec, visibility)
    cap = spec.softcap
    return attention(q, k, v, scale=spec.scale, window=window, softcap=cap, sinks=sinks, bounds=bounds)


def _masked(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    rows, mask = (1, -1), None
    if visibility.documents.cu_seqlens is None and not q.is_cuda and visibility.spans is None:
        rows = visibility.documents.shape  # equal documents have one mask
        if not _is_unmasked(spec, visibility):
            mask = visible(spec, _one_document(visibility.documents.max_seqlen, q.device))
    else:
        mask = visible(spec, visibility)
    q, k, v = (x.unflatten(0, rows).transpose(1, 2) for x in (q, k, v))
    return _grouped_sdpa(q, k, v, spec, mask).transpose(1, 2).flatten(0, 1)


def _with_padding(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    """Of rows as they are, all of whose tokens see one another, but for padding, behind all others, that sees
    padding.
    """
    assert visibility.padding is not None
    limited = spec.causal or spec.window is not None or spec.chunk is not None
    if limited or not _is_plain_softmax(spec) or visibility.documents.cu_seqlens is not None:
        raise ValueError("padding that was not taken out is for attention of all tokens, in equal rows")
    if use_triton(q) and not (q.is_cuda and q.dtype == torch.float32):  # which takes a mask of all rows
        return attention(q, k, v, scale=spec.scale, bounds=visibility.ranges_with_padding())
    pads = visibility.padding.view(visibility.documents.shape)
    mask = ~(pads[:, None, :, None] & pads[:, None, None, :])
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return _grouped_sdpa(q, k, v, spec, mask).transpose(1, 2).flatten(0, 1)


def _boundaries_are_at_hand(q: Tensor, visibility: Visibility) -> bool:
    """Whether there are boundaries, and they can be read without waiting for a device."""
    there = (
        visibility.documents.cu_seqlens is not None
        and visibility.spans is None
        and visibility.documents.tree is None
    )
    return there and q.device.type == "cpu" and not torch.compiler.is_compiling()


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    backend: AttentionBackend,
    sinks: Tensor | None,
) -> Tensor:
    """A product for each document: the sum of the squares of their lengths, not the square of the sum."""
    assert visibility.documents.cu_seqlens is not None
    lengths = visibility.documents.cu_seqlens.diff().tolist()
    documents = zip(lengths, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat(
        [
            _attend(q, k, v, spec, _one_document(length, q.device), backend, sinks)
            for length, q, k, v in documents
            if length
        ]
    )


def _one_document(length: int, device: torch.device) -> Visibility:
    return Visibility(Documents.of_rows((1, length), device))


def _grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """q [batch, heads, queries, dim]; k, v [batch, kv_heads, keys, dim]."""
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    groups = spec.num_attention_heads // spec.num_key_value_heads
    if groups > 1 and q.shape[2] == 1 and mask is not None:
        # One query sees what the others of its group see: they are so many queries of one head.
        q = q.unflatten(1, (spec.num_key_value_heads, groups)).squeeze(3)
        out = masked_attention(q, k, v, mask, spec.scale)
        return out.flatten(1, 2).unsqueeze(2)
    unusual = mask is not None or q.dtype == torch.float32 or q.shape[-1] != v.shape[-1] or q.shape[-1] > 256
    if groups > 1 and unusual:
        # The kernels that take a mask, float32 or heads like these do not know grouped heads, and the
        # fallback would keep all the scores.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if mask is not None:
        return masked_attention(q, k, v, mask, spec.scale)
    return unmasked_attention(q, k, v, spec.scale, spec.causal)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if it does not begin at a multiple of 16 bytes, as values may that stand behind keys in a
    cache: SDPA's kernels read 16 bytes at a time, and do not look where a view begins.
    """
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def _varlen(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = visibility.documents.boundaries(), visibility.documents.max_seqlen
    if visibility.spans is not None and spec.causal:
        raise ValueError("attention='varlen' has no spans; use 'auto' or 'triton'")
    before, behind = -1 if spec.window is None else spec.window - 1, 0 if spec.causal else -1
    options: dict[str, Any] = {"enable_gqa": True} if _varlen_takes_gqa_flag() else {}
    # Its backward reads dense rows of heads; the packed q|k|v row gives them a common stride, which it also
    # takes.
    return varlen_attn(  # type: ignore[return-value]  # one tensor: lse is not asked for
        q, k, v, cu, cu, longest, longest, scale=spec.scale, window_size=(before, behind), **options
    )


@functools.cache
def _varlen_takes_gqa_flag() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
