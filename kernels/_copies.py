"""Copies between tensors with gaps."""

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
