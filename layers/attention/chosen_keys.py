"""Attention to the keys, or blocks of keys, that an indexer has chosen (indexer.py)."""

from __future__ import annotations

from torch import Tensor

from liger_models.kernels import ChosenBlocks, attention
from liger_models.kernels._dispatch import use_triton
from liger_models.kernels.attention._checks import MOST_HEAD_DIM_OF_CHOSEN
from liger_models.kernels.attention.flash_attention import attention_plain, mask_of_heads
from liger_models.kernels.attention.visible_keys import visible_keys
from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.layers.attention.fused import grouped_attention
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec


def attend_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    backend: str,
    chosen: Tensor | ChosenBlocks,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` to chosen keys: by the kernel, or elsewhere with a mask, or with sinks by the plain twin.

    Raises:
        ValueError: another backend, attention that is limited otherwise, or `batch_invariant`.
    """
    if backend not in ("auto", "triton", "masked", "eager"):
        raise ValueError(f"attention={backend!r} does not support chosen keys; use 'auto' or 'triton'")
    if is_batch_invariant():
        raise ValueError(
            "attention to chosen keys depends on the batch: leave batch_invariant, or use documents of at "
            "most as many tokens as an indexer chooses"
        )
    limited = spec.window is not None or spec.chunk is not None or not spec.causal
    biased = spec.softcap is not None or spec.slopes is not None
    if limited or biased or spec.dropout or visibility.spans is not None:
        raise ValueError(
            "chosen keys need causal attention, without windows, spans, soft cap, slopes or dropout"
        )
    if backend == "masked" and sinks is not None:
        raise ValueError("attention='masked' does not support sinks; use 'auto' or 'triton'")
    bounds = visibility.documents.bounds()
    if isinstance(chosen, ChosenBlocks):
        chosen = chosen._replace(bits=chosen.bits.to(q.device))
    else:
        chosen = chosen.to(q.device)
    if backend == "auto":
        ours = use_triton(q) and max(q.shape[-1], v.shape[-1]) <= MOST_HEAD_DIM_OF_CHOSEN
        backend = "triton" if ours else "masked" if sinks is None else "eager"
    if backend == "triton":
        return attention(q, k, v, scale=spec.scale, bounds=bounds, chosen=chosen, sinks=sinks)
    if backend == "eager":
        return attention_plain(q, k, v, spec.scale, bounds, chosen=chosen, sinks=sinks)
    mask = visible_keys(len(q), bounds, None, q.device) & mask_of_heads(chosen, bounds, *q.shape[:2])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return grouped_attention(q, k, v, spec, mask).transpose(1, 2).flatten(0, 1)
