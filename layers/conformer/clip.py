"""Clamping of hidden states, which keeps only its output for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable


def clip(x: Tensor, bound: float | None) -> Tensor:
    """x clamped to +-`bound`, or to the finite numbers of its dtype if these are fewer; x itself if None.

    Elements at a bound get no gradient.
    """
    if bound is None:
        return x
    clipped: Tensor = _Clip.apply(x, min(bound, torch.finfo(x.dtype).max))
    return clipped


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound, y = bound, x.clamp(-bound, bound)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        bound = y.new_full((), ctx.bound)  # rounded like the clamped elements
        return dy.masked_fill(~(y.abs() < bound), 0), None
