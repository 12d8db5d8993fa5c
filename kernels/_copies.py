"""Copies between tensors with gaps, and from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_in_words(source: Tensor, target: Tensor) -> None:
    """Copy to a tensor of the same shape and dtype, in words of eight bytes if rows are whole words: torch's
    copies between tensors with gaps move one element per thread, at a third of the bandwidth.
    """
    per_word = 8 // source.element_size()
    if per_word > 1 and all(_holds_words(x, per_word) for x in (source, target)):
        source, target = source.view(torch.int64), target.view(torch.int64)
    target.copy_(source)


def _holds_words(x: Tensor, per_word: int) -> bool:
    sizes = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(size % per_word for size in sizes)


AT_ONCE = 1 << 16
"""Bytes that CUDA takes from any memory at once. Copies of more wait for all earlier work of the device, and
so does the host, unless the memory is pinned.
"""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for it; x itself if it is there.

    On MPS it waits: a copy that does not may read x's memory after it was freed (pytorch 189690).
    """
    pinned = x.is_cpu and device.type == "cuda" and x.nbytes > AT_ONCE
    return (x.pin_memory() if pinned else x).to(device, non_blocking=device.type != "mps")
