"""The attention product, and the choice of its implementation.

    out = softmax(cap(scale * q k^T), over the visible tokens, and the head's sink) v

A query attends to the tokens of its own document up to itself; with a window, to the last `window` of those.
If the spec is not causal it attends to its whole document, or with a window to as many tokens after it;
with spans (such as images) also to its whole span, or if it is marked to all marked tokens of its document.
Chunks cut documents into shorter ones, for every backend.
If a document continues another (layers/sequences/tree.py), its queries attend as if the continued tokens
preceded their own.
Soft cap, sinks and slopes (ALiBi): see kernels/attention/flash_attention.py.

| backend  | supports                             | implementation                                        |
|----------|--------------------------------------|-------------------------------------------------------|
| `sdpa`   | equal documents without a window     | torch's own kernels, cuDNN first: fused.py            |
| `varlen` | documents, windows; a GPU, 16 bits   | torch.nn.attention.varlen (FlashAttention 2), where   |
|          |                                      | torch has it for the GPU                              |
| `flash`  | causal, no soft cap, no slopes;      | FlashAttention 4, on request: flash.py                |
|          | Hopper, 16 bits                      |                                                       |
| `triton` | all, in heads of up to 512           | our own kernel: kernels/attention/                    |
| `masked` | documents, windows; memory T^2       | torch's own kernels with a mask: fused.py             |
| `eager`  | all; memory T^2 heads                | the plain twin: the formula above                     |

`auto` chooses among the backends that support the call:

| call                           | GPU      | elsewhere |
|--------------------------------|----------|-----------|
| equal documents, no window     | `sdpa`   | `sdpa`    |
| packed, a window, spans        | `triton` | `masked`  |
| documents that continue others | `triton` | `masked`  |
| soft cap, sinks or slopes      | `triton` | `eager`   |
| dropout                        | `sdpa` for equal documents, else |
|                                | `masked`, with caps `eager`      |

"Elsewhere" means a CPU, float64, heads of more than 512, float32 if attention is not plainly causal
(documents that continue others, spans without marks, encoders), and torch.compile, under which `triton` would
run its twin; there `varlen` precedes `masked` on a GPU in 16 bits, for heads of up to 256 that are multiples
of 8.
Values may be narrower or wider than keys, except for `varlen`. For such heads, and heads of more than 256, a
GPU uses `triton` instead of `sdpa` if cuDNN has no kernel for them: torch's other kernels keep all scores, or
copy keys and values for every query head.
On a CPU and on MPS `masked` and `eager` process packed documents one by one, so T is a document's length.

docs/benchmarks.md has measurements, and the alternatives that were tried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from liger_models.kernels import ChosenBlocks, KeyRanges, attention
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._dispatch import has_matrix_units, use_triton
from liger_models.kernels.attention.flash_attention import Once, attention_plain, has_tiles
from liger_models.kernels.attention.visible_keys import visible_keys
from liger_models.kernels.invariant.mode import is_batch_invariant, without_batch_invariance
from liger_models.layers.attention.alone import attend_aligned, attend_alone, check_alone, one_document
from liger_models.layers.attention.chosen_keys import attend_chosen
from liger_models.layers.attention.flash import flash_attention
from liger_models.layers.attention.fused import cudnn_takes, grouped_attention
from liger_models.layers.attention.kept_output import keeps_output
from liger_models.layers.attention.padded import attend_to_shown, attend_with_padding
from liger_models.layers.attention.varlen import has_varlen, varlen_attention
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec

AttentionBackend = Literal["auto", "sdpa", "varlen", "flash", "triton", "masked", "eager"]
BACKENDS: tuple[AttentionBackend, ...] = ("auto", "sdpa", "varlen", "flash", "triton", "masked", "eager")

WITH_TREES = ("triton", "masked", "eager")
WITH_DROPOUT = ("sdpa", "masked", "eager")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    backend: AttentionBackend = "auto",
    sinks: Tensor | None = None,
    chosen: Tensor | ChosenBlocks | None = None,
) -> Tensor:
    """Attention over packed documents.

    Args:
        q: [T, num_attention_heads, head_dim]; k: [T, num_key_value_heads, head_dim]; v: the same, or with
            heads of another size; any strides.
        spec: scale, window, chunk and soft cap.
        sequences: the documents. If they are divided over ranks, q, k and v belong to this rank's tokens, and
            heads are exchanged: layers/sequences/sequence_parallel.py.
        backend: a row of the table above, or "auto".
        sinks: [num_attention_heads], if the spec has them.
        chosen: the keys that this rank's tokens attend to, [T, words] (`kernels.choose_keys`), or blocks of
            them (`kernels.choose_blocks`); None: all.

    Returns:
        [T, num_attention_heads, the size of v's heads].

    Raises:
        ValueError: the named backend does not support the call, or is unknown.
    """
    if spec.sinks != (sinks is not None):
        given = "no sinks" if sinks is None else "sinks"
        raise ValueError(f"got {given}, but the spec says sinks={spec.sinks}")
    once = sequences.once if keeps_output(spec, sequences.documents.max_seqlen) else None
    if sequences.slice is not None:
        own, own_sinks = sequences.slice.own_heads(spec, sinks)
        q, k, v = sequences.slice.to_heads(q, k, v)
        chosen = None if chosen is None else sequences.slice.chosen_by_heads(chosen)
        out = _attend(q, k, v, own, sequences.visibility, backend, own_sinks, chosen, once)
        return sequences.slice.to_tokens(out)
    return _attend(q, k, v, spec, sequences.visibility, backend, sinks, chosen, once)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    backend: AttentionBackend,
    sinks: Tensor | None,
    chosen: Tensor | ChosenBlocks | None = None,
    once: Once | None = None,
) -> Tensor:
    if chosen is not None:
        return attend_chosen(q, k, v, spec, visibility, backend, chosen, sinks)
    if is_batch_invariant():
        return _alone(q, k, v, spec, visibility, sinks)
    if visibility.padding is not None:
        return attend_with_padding(q, k, v, spec, visibility)
    if visibility.hidden is not None:
        return attend_to_shown(q, k, v, spec, visibility)
    visibility = _effective(spec, visibility)
    if backend == "auto":
        backend = _choose(q, k, v, spec, visibility)
    return _run(q, k, v, spec, visibility, backend, sinks, once)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    backend: AttentionBackend,
    sinks: Tensor | None,
    once: Once | None = None,
) -> Tensor:
    if visibility.documents.tree is not None and backend not in WITH_TREES:
        raise ValueError(
            f"attention={backend!r} does not support documents that continue others; use 'auto' or 'triton'"
        )
    if spec.dropout and backend not in WITH_DROPOUT:
        raise ValueError(
            f"attention={backend!r} does not drop weights, and this model's dropout is {spec.dropout}: use "
            "'auto', which is slower with packed documents, or load the model without dropout (dropout=0.0)"
        )
    if backend in ("masked", "eager") and _boundaries_on_host(q, visibility):
        return _one_by_one(q, k, v, spec, visibility, backend, sinks)
    if backend == "triton":
        return _triton(q, k, v, spec, visibility, sinks, once)
    if backend == "flash":
        return flash_attention(q, k, v, spec, visibility, sinks)
    if backend == "eager":
        return _plain(q, k, v, spec, visibility, sinks)
    if backend not in ("sdpa", "varlen", "masked"):
        raise ValueError(f"unknown attention backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if not spec.is_plain_softmax:
        raise ValueError(
            f"attention={backend!r} supports neither soft cap, sinks nor slopes; use 'auto' or 'triton'"
        )
    if backend == "sdpa":
        return _sdpa(q, k, v, spec, visibility, once)
    if backend == "varlen":
        return varlen_attention(q, k, v, spec, visibility)
    return _masked(q, k, v, spec, visibility)


def _alone(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility, sinks: Tensor | None
) -> Tensor:
    """`_attend` in `batch_invariant`."""
    visibility = visibility if spec.bidirectional_spans else visibility.without_spans()
    check_alone(visibility)
    ours = use_triton(q) and has_tiles(q, v)
    backend: AttentionBackend = "triton" if ours else "masked" if spec.is_plain_softmax else "eager"

    def attend(q: Tensor, k: Tensor, v: Tensor, own: Visibility) -> Tensor:
        return _run(q, k, v, spec, _effective(spec, own), backend, sinks)

    with without_batch_invariance():
        return (attend_aligned if ours else attend_alone)(q, k, v, visibility.documents, attend)


def attend_by_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    backend: AttentionBackend = "auto",
    sinks: Tensor | None = None,
    chosen: Tensor | ChosenBlocks | None = None,
) -> list[Tensor]:
    """`attend` in groups of heads, returned as a list. Long sequences run one key head at a time if that
    saves memory: the backward pass of `sdpa` sums the gradients of queries in float32 and repeats keys and
    values for every query head, 4 times their size if all heads run at once.
    """
    groups = spec.num_key_value_heads
    at_once = chosen is not None or sequences.slice is not None or is_batch_invariant()
    if len(q) > LONG and groups > 1 and not at_once:
        if backend == "auto":
            backend = _choose(q, k, v, spec, _effective(spec, sequences.visibility))
        if backend == "sdpa":
            heads = spec.num_attention_heads // groups
            one = replace(spec, num_attention_heads=heads, num_key_value_heads=1)
            parts = zip(q.split(heads, dim=1), k.split(1, dim=1), v.split(1, dim=1), strict=True)
            return [attend(*part, one, sequences, backend) for part in parts]
    return [attend(q, k, v, spec, sequences, backend, sinks, chosen)]


LONG = 1 << 16  # tokens, for which four heads keep a GPU busy


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences, sinks: Tensor | None = None
) -> Tensor:
    """The plain twin of `attend`."""
    return _plain(q, k, v, spec, _effective(spec, sequences.visibility), sinks)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility, sinks: Tensor | None
) -> Tensor:
    bounds, window = _bounds(spec, visibility)
    slopes = slopes_of(spec, q.device)
    return attention_plain(q, k, v, spec.scale, bounds, window, spec.softcap, sinks, slopes, spec.dropout)


def slopes_of(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """The slopes of the heads, if there are any."""
    return None if spec.slopes is None else _cached_slopes(spec.slopes, device)


@cached_tensors(64)
def _cached_slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device="cpu").to(device)


def _bounds(spec: AttentionSpec, visibility: Visibility) -> tuple[Tensor | KeyRanges | None, int | None]:
    """The bounds and the window for `kernels.attention`."""
    if not _by_ranges(spec, visibility):
        return visibility.documents.bounds(), spec.window
    if visibility.documents.tree is not None and spec.causal:
        ranges = visibility.documents.tree.key_ranges(spec.window, spec.chunk, visibility.spans)
        return ranges._replace(marked=visibility.marked), None
    return visibility.key_ranges(spec.window, spec.causal, spec.whole_spans), None


def _by_ranges(spec: AttentionSpec, visibility: Visibility) -> bool:
    """Whether visibility depends on more than documents and a window."""
    return not spec.causal or visibility.spans is not None or visibility.documents.tree is not None


def visible(spec: AttentionSpec, visibility: Visibility) -> Tensor:
    """The keys (columns) that each query (row) attends to: [T, T] bool."""
    documents = visibility.documents
    return visible_keys(documents.num_tokens, *_bounds(spec, visibility), documents.device)


def _effective(spec: AttentionSpec, visibility: Visibility) -> Visibility:
    visibility = visibility if spec.bidirectional_spans else visibility.without_spans()
    return (
        visibility
        if spec.chunk is None or visibility.documents.tree is not None
        else visibility.chunks(spec.chunk)
    )


def _choose(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> AttentionBackend:
    plain = spec.is_plain_softmax
    if spec.dropout:
        return "eager" if not plain else "sdpa" if _is_unmasked(spec, visibility) else "masked"
    ours = use_triton(q) and has_tiles(q, v)
    if q.dtype == torch.float32 and _by_ranges(spec, visibility) and visibility.marked is None:
        ours = False  # in float32 the kernel has not been timed against a mask
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
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    flash = q.is_cuda and fits and has_matrix_units(q.device) and has_varlen(q.device)
    if plain:
        return "varlen" if flash and usual and visibility.spans is None else "masked"
    return "eager"


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> bool:
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return cudnn_takes(q, k, v, spec.causal)


def _is_unmasked(spec: AttentionSpec, visibility: Visibility) -> bool:
    """Whether documents are equal, and nothing but causality hides tokens of them."""
    all_of_it = spec.window is None or spec.window >= visibility.documents.max_seqlen
    return (
        visibility.documents.cu_seqlens is None
        and all_of_it
        and (visibility.spans is None or not spec.causal)
    )


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility, once: Once | None
) -> Tensor:
    if not _is_unmasked(spec, visibility):
        raise ValueError(
            "attention='sdpa' supports neither packed documents, padding, windows nor spans; use 'auto' or "
            "'triton'"
        )
    # Views all the way: [T, heads, dim] -> [batch, heads, seq, dim] without a copy, also out of a packed
    # q|k|v row.
    q, k, v = (x.unflatten(0, visibility.documents.shape).transpose(1, 2) for x in (q, k, v))
    return grouped_attention(q, k, v, spec, None, once).transpose(1, 2).flatten(0, 1)


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    sinks: Tensor | None,
    once: Once | None,
) -> Tensor:
    bounds, window = _bounds(spec, visibility)
    options: dict[str, Any] = {"softcap": spec.softcap, "sinks": sinks, "slopes": slopes_of(spec, q.device)}
    return attention(q, k, v, scale=spec.scale, window=window, bounds=bounds, once=once, **options)


def _masked(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> Tensor:
    rows, mask = (1, -1), None
    if visibility.documents.cu_seqlens is None and not q.is_cuda and visibility.spans is None:
        rows = visibility.documents.shape  # equal documents have one mask
        if not _is_unmasked(spec, visibility):
            mask = visible(spec, one_document(visibility.documents.max_seqlen, q.device))
    else:
        mask = visible(spec, visibility)
    q, k, v = (x.unflatten(0, rows).transpose(1, 2) for x in (q, k, v))
    return grouped_attention(q, k, v, spec, mask).transpose(1, 2).flatten(0, 1)


def _boundaries_on_host(q: Tensor, visibility: Visibility) -> bool:
    """Whether there are boundaries that can be read without a synchronisation."""
    there = (
        visibility.documents.cu_seqlens is not None
        and visibility.spans is None
        and visibility.documents.tree is None
    )
    return there and q.device.type in ("cpu", "mps") and not torch.compiler.is_compiling()


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    backend: AttentionBackend,
    sinks: Tensor | None,
) -> Tensor:
    """One product for each document: the work is the sum of their squared lengths."""
    assert visibility.documents.cu_seqlens is not None
    lengths = visibility.documents.cu_seqlens.diff().tolist()
    documents = zip(lengths, *(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            _attend(q, k, v, spec, one_document(length, q.device), backend, sinks)
            for length, q, k, v in documents
            if length
        ]
    )
