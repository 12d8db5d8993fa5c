"""Clamping of hidden states, which keeps only one byte per element for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable


def clip(x: Tensor, bound: float | None) -> Tensor:
    """x clamped to +-`bound`, or to the finite numbers of its dtype if these are fewer; x itself if None.

    Elements beyond a bound get no gradient; those at a bound get theirs, as in torch 2.13.
    """
    if bound is None:
        return x
    clipped: Tensor = _Clip.apply(x, min(bound, torch.finfo(x.dtype).max))
    return clipped


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        # The output does not tell elements at a bound from those beyond it.
        ctx.save_for_backward(x.abs() <= bound)
        return x.clamp(-bound, bound)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return dy.masked_fill(~inside, 0), None
