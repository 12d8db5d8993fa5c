"""Scaling of queries by their positions (Nakanishi, 2025, arXiv:2501.19399, in the form of Llama 4):

    q[t] = q[t] * (1 + beta * log(1 + floor((first + position[t]) / length)))
        or q[t] * (1 + (first + position[t]) / length)^beta   (Beam, 2026)
        or q[t] * (1 + beta * log(max(1, (first + position[t]) / length)))   (Inkling, 2026)

The factors are made once for all layers, in float32 (`Positions.query_scale`), and a product is rounded once,
without a copy of the queries in float32. Mistral Large 4 learns two numbers per head h instead:

    q[t, h] = q[t, h] * (scale[h] * log(1 + position[t]) + bias[h])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import QueryScaleSpec


def scale_queries(q: Tensor, spec: QueryScaleSpec | None, sequences: Sequences) -> Tensor:
    """Multiply q [T, heads, head_dim] by the factors of its tokens, in its dtype; without a spec return q."""
    if spec is None:
        return q
    return _Scaled.apply(q, sequences.positions.query_scale(spec)[:, None, None])


class LearnedQueryScale(nn.Module):
    """Learned factors of queries by position, for each of `heads` heads."""

    def __init__(self, heads: int):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def forward(self, q: Tensor, sequences: Sequences) -> Tensor:
        """q [T, heads, head_dim], scaled, in its dtype."""
        wide = torch.promote_types(self.scale.dtype, torch.float32)
        logarithms = sequences.positions.logarithms()[:, None].to(wide)
        return _ScaledByHead.apply(q, logarithms * self.scale.to(wide) + self.bias.to(wide))

    def reset_parameters(self, *_: object) -> None:
        """Set all factors to one."""
        nn.init.zeros_(self.scale)
        nn.init.ones_(self.bias)


class _ScaledByHead(torch.autograd.Function):
    """q [T, heads, head_dim] times factors [T, heads], of at least float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(q, factors)
        return _rounded_product(q, factors[..., None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        q, factors = ctx.saved_tensors
        dq = _rounded_product(dy, factors[..., None]) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dq, None
        # Some tokens at a time, since the products are as large as the queries, in float32.
        pieces = zip(dy.split(_TOKENS), q.split(_TOKENS), strict=True)
        dots = [(a.to(factors.dtype) * b.to(factors.dtype)).sum(-1) for a, b in pieces]
        return dq, torch.cat(dots)


_TOKENS = 1024


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
