"""A linear layer whose output is multiplied by a number s, within its matrix products.

    y = s x W^T;   dx = s dy W,   dW = s dy^T x

The products multiply their sums in float32, and round once. As an operation of its own the multiplication
would read and write every element of y, and of its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import as_once_differentiable, once_differentiable, use_triton


def scaled_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """scale * x @ weight.T.

    Args:
        x: [T, I].
        weight: [H, I], of x's dtype.

    Returns:
        [T, H]. On a CPU, and wherever no kernels run, the product is rounded before it is multiplied.
    """
    if not use_triton(x, weight):
        return as_once_differentiable(F.linear(x, weight) * scale)
    return _ScaledLinear.apply(x, weight, scale)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a @ b, of matrices."""
    if scale == 1.0:
        return a @ b
    return a.new_empty(len(a), b.shape[1]).addmm_(a, b, beta=0, alpha=scale)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scaled_product(x, weight.t(), scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        dx = scaled_product(dy, weight, ctx.scale) if want_x else None
        dweight = scaled_product(dy.t(), x, ctx.scale) if want_weight else None
        return dx, dweight, None
