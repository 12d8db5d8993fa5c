"""FlashAttention 4 for `attention="flash"`: the package flash-attn-4, on Hopper GPUs and in 16 bits.

It does documents, equal or packed, causal or not, windows and sinks, in heads of a multiple of 8 up to 256.
What it does not do, or not exactly, is refused by name: nothing falls back to another mask or backend.

Blocks of keys add to the queries' gradient in turns (its option `deterministic`), so that gradients are the
same bits in every run. Beside the gradients its backward pass takes float32 sums of all three. Kernels are
compiled at their first call, about 6 s each for a forward and a backward pass, and anew for other heads and
groups, for windows, sinks and packed documents; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on disk.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import as_once_differentiable, on_device_of
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import AttentionSpec

_DTYPES = (torch.bfloat16, torch.float16)


@torch.compiler.disable
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend`; a break of the graph under torch.compile: the package launches nothing while it is traced.

    Raises:
        ValueError: what it cannot do, the wrong GPU or dtype, or flash-attn-4 is not installed.
    """
    _refuse_others(q, k, v, spec, sequences)
    library = _library()
    window = spec.window if spec.window is not None and spec.window < sequences.max_seqlen else None
    options: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "window_size": (None if window is None else window - 1, None if window is None else 0),
        "learnable_sink": sinks,
        "deterministic": True,
    }
    with on_device_of(q):
        if sequences.cu_seqlens is None:
            rows = (x.unflatten(0, sequences.shape) for x in (q, k, v))
            out = library.flash_attn_func(*rows, **options)[0].flatten(0, 1)
        else:
            for of in ("q", "k"):
                options[f"cu_seqlens_{of}"] = sequences.cu_seqlens
                options[f"max_seqlen_{of}"] = sequences.max_seqlen
            out = library.flash_attn_varlen_func(q, k, v, **options)[0]
    return as_once_differentiable(out)


def _refuse_others(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> None:
    sizes = q.shape[-1], v.shape[-1]
    equal = sizes[0] == sizes[1]
    unfit = max(sizes) > 256 or any(size % 8 for size in sizes)
    others = {
        "a soft cap (the tanh of its own has 11 bits)": spec.softcap is not None,
        "spans": sequences.spans is not None and spec.causal,
        "a window without causality": spec.window is not None and not spec.causal,
        f"heads of {sizes[0]} with values of {sizes[1]} (multiples of 8 up to 256)": unfit,
        "values of another size than keys that query heads share": not equal and q.shape[1] != k.shape[1],
        f"{q.dtype} (16 bits alone)": q.dtype not in _DTYPES,
        f"{_device(q)} (Hopper GPUs alone)": _device(q) != "sm_90",
    }
    for other, asked in others.items():
        if asked:
            raise ValueError(f"attention='flash' does not take {other}; use 'auto' or 'triton'")


def _device(q: Tensor) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(q.device)) if q.is_cuda else str(q.device)


@functools.cache
def _library() -> ModuleType:
    try:
        import flash_attn.cute
    except ImportError as error:
        raise ValueError(
            f"attention='flash' needs the package flash-attn-4 ({error}): pip install 'liger_models[flash]'"
        ) from error
    return flash_attn.cute
