"""FlashAttention 4 for `attention="flash"`: the package flash-attn-4, on Hopper GPUs and in 16 bits.

It supports causal attention over documents, equal or packed, with windows and sinks, for the head sizes
below, which were compared with the exact result on an H200. Everything else raises an error that names it,
without a fallback: attention that is not causal, which was wrong there (heads of 80), and soft caps, whose
tanh comes from an instruction of 11 bits.

Blocks of keys add to the queries' gradient in a fixed order (option `deterministic`), so gradients have the
same bits in every run. The backward pass allocates float32 sums of all three gradients in addition to them.
Kernels are compiled at their first call, 17 s for a forward and a backward pass, and again for other heads
and groups, for windows, sinks and packed documents; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on
disk.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import as_once_differentiable
from liger_models.layers.attention.reach import REACH
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec

_DTYPES = (torch.bfloat16, torch.float16)
_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # of keys and of values


@not_compiled
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    visibility: Visibility,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` by FlashAttention 4. It breaks the graph under torch.compile, since the package launches no
    kernel while it is traced.

    Raises:
        ValueError: an unsupported call, GPU or dtype, or flash-attn-4 is not installed.
    """
    _refuse_others(q, k, v, spec, visibility)
    library, documents = _library(), visibility.documents
    window = spec.window if spec.window is not None and spec.window < documents.max_seqlen else None
    options: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": (None if window is None else window - 1, None if window is None else 0),
        "learnable_sink": sinks,
        "deterministic": True,
    }
    if documents.cu_seqlens is None:
        rows = (x.unflatten(0, documents.shape) for x in (q, k, v))
        out = library.flash_attn_func(*rows, **options)[0].flatten(0, 1)
    else:
        for of in ("q", "k"):
            options |= {f"cu_seqlens_{of}": documents.cu_seqlens, f"max_seqlen_{of}": documents.max_seqlen}
        out = library.flash_attn_varlen_func(q, k, v, **options)[0]
    return as_once_differentiable(out)


def _refuse_others(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visibility: Visibility) -> None:
    sizes = q.shape[-1], v.shape[-1]
    known = ", ".join(str(keys) if keys == values else f"{keys} with {values}" for keys, values in _SIZES)
    shared = q.shape[1] != k.shape[1]
    others = {
        "a soft cap (its tanh has 11 bits)": spec.softcap is not None,
        "slopes (ALiBi)": spec.slopes is not None,
        "attention that is not causal": not spec.causal,
        "spans": visibility.spans is not None,
        f"heads of {sizes[0]} with values of {sizes[1]} (only {known} are supported)": sizes not in _SIZES,
        "values of another size than keys that query heads share": shared and sizes[0] != sizes[1],
        f"{q.dtype} (only 16 bits are supported)": q.dtype not in _DTYPES,
        f"{q.numel()} elements (only {REACH} are addressed)": q.numel() > REACH,
        f"{_device(q)} (only Hopper GPUs are supported)": _device(q) != "sm_90",
    }
    for other, asked in others.items():
        if asked:
            raise ValueError(f"attention='flash' does not take {other}; use 'auto' or 'triton'")


def _device(q: Tensor) -> str:
    if not q.is_cuda:
        return str(q.device)
    if torch.version.hip is not None:  # whose capabilities are numbers of other architectures
        return str(torch.cuda.get_device_properties(q.device).gcnArchName)
    return "sm_{}{}".format(*torch.cuda.get_device_capability(q.device))


@functools.cache
def _library() -> ModuleType:
    try:
        import flash_attn.cute
    except ImportError as error:
        raise ValueError(
            f"attention='flash' needs the package flash-attn-4 ({error}): pip install 'liger_models[flash]'"
        ) from error
    return flash_attn.cute
