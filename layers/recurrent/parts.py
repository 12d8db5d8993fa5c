"""Splitting of channels whose gradients are joined without a copy where they are adjacent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable


def split_channels(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """x [T, C] -> views [T, width] of the widths, which add up to C.

    Like `torch.split`, whose gradient is always a concatenation. Here gradients that are adjacent columns of
    one tensor, as `ssd` writes them, become the gradient of x as they are.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return x.split(list(widths), dim=-1)
    parts: tuple[Tensor, ...] = _Split.apply(x, *widths)
    return parts


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *widths: int) -> tuple[Tensor, ...]:
        return x.split(list(widths), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = _whole(gradients)
        return torch.cat(gradients, dim=-1) if whole is None else whole, *[None] * len(gradients)


def _whole(gradients: tuple[Tensor, ...]) -> Tensor | None:
    """The tensor [T, C] whose adjacent columns are the gradients; None if there is none."""
    first = gradients[0]
    tokens, channels = len(first), sum(part.shape[1] for part in gradients)
    offset = first.storage_offset()
    for part in gradients:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != (channels, 1) or part.storage_offset() != offset:
            return None
        offset += part.shape[1]
    return first.as_strided((tokens, channels), (channels, 1))
