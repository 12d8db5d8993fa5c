"""Products in float32, whatever the model's dtype: rounded logits of a router would change its choice of
experts.

    logits = x @ weight.T

For the backward pass the operands are saved, not their casts of twice the size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable, without_autocast
from liger_models.layers.projections.linear import Linear


def product_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] @ weight [E, H].T -> [T, E] in float32 (float64 stays), under autocast too. Gradients have the
    operands' dtypes.
    """
    return _ProductInFloat32.apply(x, weight)


class Float32Linear(Linear):
    """A projection without a bias in float32. Its weight may have a wider dtype than other matrices."""

    wider_matrices = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features] in float32."""
        return product_in_float32(x, self.weight)


class _ProductInFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide_product(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad
        dx = _wide_product(dy, weight).to(x.dtype) if want_x else None
        return dx, _wide_product(dy.T, x).to(weight.dtype) if want_weight else None


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with without_autocast(a):
        return a.to(dtype) @ b.to(dtype)
