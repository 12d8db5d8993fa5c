"""Scaling of queries by their positions (Nakanishi, 2025, arXiv:2501.19399, in the form of Llama 4):

    q[t] = q[t] * (1 + beta * log(1 + floor((first + position[t]) / length)))

The factors are made once for all layers, in float32 (`Positions.query_scale`), and a product is rounded once,
without a copy of the queries in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import QueryScaleSpec


def scale_queries(q: Tensor, spec: QueryScaleSpec | None, sequences: Sequences) -> Tensor:
    """Multiply q [T, heads, head_dim] by the factors of its tokens, in its dtype; without a spec return q."""
    if spec is None:
        return q
    return _Scaled.apply(q, sequences.positions.query_scale(spec)[:, None, None])


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return _rounded_product(q, factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (factors,) = ctx.saved_tensors
        return _rounded_product(dy, factors), None


def _rounded_product(x: Tensor, factors: Tensor) -> Tensor:
    """The product in x's dtype, computed in the wider dtype."""
    return torch.mul(x, factors, out=torch.empty_like(x))
