"""Rows of zeros between the frames of clips."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def with_rows_after(x: Tensor, lengths: Sequence[int], more: Sequence[int]) -> Tensor:
    """x [sum of lengths, D] with so many rows of zeros after the rows of each clip."""
    if not any(more):
        return x
    return torch.cat(
        [F.pad(clip, (0, 0, 0, n)) for clip, n in zip(x.split(list(lengths)), more, strict=True)]
    )


def without_rows_after(x: Tensor, lengths: Sequence[int], more: Sequence[int]) -> Tensor:
    """x without these rows."""
    if not any(more):
        return x
    clips = x.split([n for both in zip(lengths, more, strict=True) for n in both])
    return torch.cat(clips[::2])
