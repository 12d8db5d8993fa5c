"""Normalisation layers. Formulas and orders of casts: kernels/norms/."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from liger_models.kernels import add_rms_norm, layer_norm, rms_norm
from liger_models.layers.activation_memory import carry_recipe
from liger_models.layers.spec import NormCast, NormSpec


class LigerRMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), alone or together with the residual add before
    it.

    `norm(x)` gives the normalised tensor; `norm(x, residual)` gives the normalised sum and the sum. The
    normalised tensor carries a recipe, so inside a model only the sum is kept for the backward pass.

    Args:
        hidden_size: the width H of the last dimension.
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1.0). The weight starts at `1 - offset`.
        cast: "llama", "gemma" or "float32": where the result is rounded to the input's dtype.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, cast: NormCast = "llama"):
        super().__init__()
        self.eps, self.offset, self.cast = eps, offset, cast
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    @classmethod
    def from_spec(cls, hidden_size: int, spec: NormSpec) -> LigerRMSNorm:
        return cls(hidden_size, spec.eps, spec.offset, spec.cast)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., H] -> normalised [..., H]; with `residual` [..., H]: (normalised sum, sum)."""
        norm = functools.partial(rms_norm, eps=self.eps, offset=self.offset, cast=self.cast)
        if residual is None:
            return carry_recipe(norm(x, self.weight), norm, x, self.weight)
        y, total = add_rms_norm(x, residual, self.weight, self.eps, self.offset, self.cast)
        return carry_recipe(y, norm, total, self.weight), total

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}, cast={self.cast!r}"


class LigerLayerNorm(nn.Module):
    """LayerNorm (Ba et al., 2016, arXiv:1607.06450): `(x - mean) / sqrt(var + eps) * weight + bias`.

    Args:
        hidden_size: the width H of the last dimension.
        eps: added to the variance.
        bias: whether there is a bias.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"
