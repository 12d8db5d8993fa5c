"""Splitting of channels into heads, whose gradients are joined without a copy where they are adjacent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._copies import copy_in_words
from liger_models.kernels._dispatch import once_differentiable

Heads = tuple[int, int]  # number and width


def split_heads(x: Tensor, heads: Sequence[Heads]) -> tuple[Tensor, ...]:
    """x [T, C] -> views [T, number, width] for each of `heads`, whose widths add up to C.

    Like `torch.split`, whose gradient is always a concatenation. Here gradients that are adjacent columns of
    one tensor, as `ssd` writes them, become the gradient of x as they are; others, which may have gaps
    between heads, are copied once.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return _views(x, heads)
    parts: tuple[Tensor, ...] = _Split.apply(x, tuple(heads))
    return parts


def _views(x: Tensor, heads: Sequence[Heads]) -> tuple[Tensor, ...]:
    parts = x.split([number * width for number, width in heads], dim=-1)
    return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, heads, strict=True))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: tuple[Heads, ...]) -> tuple[Tensor, ...]:
        ctx.heads = heads
        return _views(x, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = _whole(gradients)
        if whole is None:
            channels = sum(number * width for number, width in ctx.heads)
            whole = gradients[0].new_empty(len(gradients[0]), channels)
            for part, target in zip(gradients, _views(whole, ctx.heads), strict=True):
                copy_in_words(part, target)
        return whole, None


def _whole(gradients: tuple[Tensor, ...]) -> Tensor | None:
    """The tensor [T, C] whose adjacent columns are the gradients [T, number, width]; None if none is."""
    first = gradients[0]
    tokens, channels = len(first), sum(part.shape[1] * part.shape[2] for part in gradients)
    offset = first.storage_offset()
    for part in gradients:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != (channels, part.shape[2], 1) or part.storage_offset() != offset:
            return None
        offset += part.shape[1] * part.shape[2]
    return first.as_strided((tokens, channels), (channels, 1))
