"""Normalisation layers. Formulas and casts: kernels/norms/."""

from __future__ import annotations

import functools
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm, sigmoid_gated
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import (
    ActivationMemory,
    carry_float8_recipe,
    carry_recipe,
    recompute,
)
from liger_models.layers.specs import GatedNormSpec, LayerNormSpec, NormCast, NormSpec


@overload
def make_norm(width: int, spec: NormSpec | LayerNormSpec) -> LigerRMSNorm | LigerLayerNorm: ...


@overload
def make_norm(width: int, spec: NormSpec | LayerNormSpec | GatedNormSpec) -> Norm: ...


def make_norm(width: int, spec: NormSpec | LayerNormSpec | GatedNormSpec) -> Norm:
    """Create the norm that the spec describes, over a last dimension of `width`."""
    if isinstance(spec, GatedNormSpec):
        return GatedRMSNorm(width, spec)
    if isinstance(spec, NormSpec):
        return LigerRMSNorm(width, spec.eps, spec.offset, spec.cast, spec.float32_stream, spec.weighted)
    return LigerLayerNorm(width, spec.eps, spec.bias, spec.offset, spec.weighted)


class LigerRMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), alone or fused with the preceding residual add.

    `norm(x)` returns the normalised tensor; `norm(x, residual)` returns the normalised sum and the sum. The
    normalised tensor carries a recipe, so inside a model only the sum is saved for the backward pass.

    Args:
        hidden_size: the width H of the last dimension.
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1.0). The weight starts at `1 - offset`.
        cast: "llama", "gemma" or "float32": where the result is rounded to the input's dtype.
        float32_stream: the sum is in float32, and is normalised as rounded to the dtype of x or of the
            residual, whichever is narrower.
        weighted: whether there is a weight.

    Attributes:
        float8_copy: write a float8 copy of the result in the same pass, for a linear layer (`set_float8`).
        float8_gradient: likewise of the gradient of the sum, for the linear layer that made x.
        remakes_input: the recipe of the result also recomputes an input that carries a recipe itself.
    """

    remakes_input: bool = False
    float8_copy: bool = False
    float8_gradient: bool = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        cast: NormCast = "llama",
        float32_stream: bool = False,
        weighted: bool = True,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.eps, self.offset, self.cast, self.float32_stream = eps, offset, cast, float32_stream
        self.weight = nn.Parameter(torch.empty(hidden_size)) if weighted else None
        self.reset_parameters()

    def reset_parameters(self, *_: Any) -> None:
        """Initialise the factor to one, regardless of the initialisation of matrices."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., H] -> normalised [..., H]; with `residual` [..., H]: (normalised sum, sum)."""
        if residual is None:
            return self._alone(x)
        if self.float32_stream and not torch.is_autocast_enabled(x.device.type):
            branch = min(x.dtype, residual.dtype, key=lambda dtype: dtype.itemsize)
            total = x.to(torch.promote_types(x.dtype, torch.float32)) + residual
            return self._alone(total.to(branch)), total
        cast = self._cast_for(x)
        copies = self.float8_copy, self.float8_gradient
        y, total = add_rms_norm(x, residual, self.weight, self.eps, self.offset, cast, *copies)
        return self._with_recipe(y, total, cast), total

    def _alone(self, x: Tensor) -> Tensor:
        cast = self._cast_for(x)
        y = rms_norm(x, self.weight, self.eps, self.offset, cast, self.float8_copy)
        return self._with_recipe(y, x, cast)

    def _with_recipe(self, y: Tensor, x: Tensor, cast: NormCast) -> Tensor:
        norm = functools.partial(rms_norm, eps=self.eps, offset=self.offset, cast=cast)
        if self.weight is None:
            norm = functools.partial(norm, weight=None)
        inputs = (x,) if self.weight is None else (x, self.weight)
        if self.float8_copy:
            carry_float8_recipe(y, functools.partial(norm, float8=True), *inputs, late=True)
        return carry_recipe(y, norm, *inputs, late=True, deep=self.remakes_input)

    def _cast_for(self, x: Tensor) -> NormCast:
        """Cast to use: a weight wider than the model's matrices would promote the result, which they could
        not take; under autocast the result is rounded anyway.
        """
        if self.weight is None or self.weight.dtype == x.dtype:
            return self.cast
        promotes = torch.promote_types(x.dtype, self.weight.dtype) != x.dtype
        if promotes and self.cast == "llama" and not torch.is_autocast_enabled(x.device.type):
            return "float32"
        return self.cast

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: the input, and 1/rms in float32. The consumer accounts for the output."""
        return itemsize * self.hidden_size + 4

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, cast={self.cast!r}"


class LigerLayerNorm(nn.Module):
    """LayerNorm (Ba et al., 2016, arXiv:1607.06450): `(x - mean) / sqrt(var + eps) * (offset + weight) +
    bias`, alone or fused with the preceding residual add, like `LigerRMSNorm`.

    Args:
        hidden_size: the width H of the last dimension.
        eps: added to the variance.
        bias: whether there is a bias.
        offset: added to the weight (Nemotron: 1.0). The weight starts at `1 - offset`.
        weighted: whether there is a weight.

    Raises:
        ValueError: a bias without a weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        offset: float = 0.0,
        weighted: bool = True,
    ):
        super().__init__()
        if bias and not weighted:
            raise ValueError("a LayerNorm with a bias has a weight; set both, or neither")
        self.hidden_size = hidden_size
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(hidden_size)) if weighted else None
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, *_: Any) -> None:
        """Initialise the factor to one and the bias to zero, regardless of the initialisation of matrices."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., H] -> normalised [..., H]; with `residual` [..., H]: (normalised sum, sum)."""
        norm = functools.partial(layer_norm, eps=self.eps, offset=self.offset)
        if self.weight is None:
            norm = functools.partial(norm, weight=None)
        parameters = tuple(p for p in (self.weight, self.bias) if p is not None)
        if residual is None:
            return carry_recipe(norm(x, *parameters), norm, x, *parameters, late=True)
        y, total = add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.offset)
        return carry_recipe(y, norm, total, *parameters, late=True), total

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: the input, mean and 1/std in float32. The consumer accounts for the
        output."""
        return itemsize * self.hidden_size + 8

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, bias={self.bias is not None}, offset={self.offset}"


class GatedRMSNorm(nn.Module):
    """RMSNorm times a gate of low rank, y * sigmoid(W_2 silu(W_1 y)) with y = norm(x) (A.X K2, 2026). Alone
    or fused with the preceding residual add, like `LigerRMSNorm`.

    For the backward pass it keeps what the norm keeps and W_1 y; the gate is made again.

    Args:
        width: of the last dimension, H.
        spec: the norm, and the rank of its gate.

    Attributes:
        mlp: the gate's matrices, fc1 and fc2.
    """

    activation_memory: ActivationMemory = "lean"

    def __init__(self, width: int, spec: GatedNormSpec):
        super().__init__()
        self.hidden_size, self.rank = width, spec.rank
        self.norm = make_norm(width, spec.norm)
        self.mlp = _GateMatrices(width, spec.rank)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [T, H] -> [T, H]; with `residual` [T, H]: (the gated normalised sum, the sum)."""
        if residual is None:
            return self._with_gate(self.norm(x))
        y, total = self.norm(x, residual)
        return self._with_gate(y), total

    def _with_gate(self, y: Tensor) -> Tensor:
        low = self.mlp.fc1(y)
        if self.activation_memory == "all":
            return self._gated(low, y)
        out: Tensor = recompute(self._gated, low, y)
        return out

    def _gated(self, low: Tensor, y: Tensor) -> Tensor:
        gate = self.mlp.fc2(F.silu(low))
        if gate.dtype != y.dtype or torch.compiler.is_compiling():
            return (y * gate.float().sigmoid()).to(y.dtype)
        return sigmoid_gated(gate, y)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: those of the norm, the product of low rank, and the output, which its
        consumers keep and which others than `all` count here; with `all` also the normalised tensor, the
        activation and the gate.
        """
        more = self.hidden_size + self.rank if level == "all" else 0
        kept = self.hidden_size + self.rank + more
        return self.norm.activation_bytes(level, itemsize) + itemsize * kept


class _GateMatrices(nn.Module):
    def __init__(self, width: int, rank: int):
        super().__init__()
        self.fc1, self.fc2 = Linear(width, rank, bias=False), Linear(rank, width, bias=False)


class Unnormalised(nn.Module):
    """The end of a model whose last layer normalises its sum: the residual stream as it is."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [T, H] -> x; with `residual` [T, H]: the sum, twice."""
        if residual is None:
            return x
        return x + residual, x + residual

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: none."""
        return 0


Norm = LigerRMSNorm | LigerLayerNorm | GatedRMSNorm
