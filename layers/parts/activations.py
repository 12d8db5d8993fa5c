"""Activations as modules, for use in any model. Formulas: kernels/activations/."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import relu2, softmax, xielu
from liger_models.layers.recompute.activation_memory import carry_recipe


class LigerSoftmax(nn.Module):
    """Softmax over one dimension, in x's dtype, with sums in float32.

    Args:
        dim: the dimension; any other than the last costs a copy.
    """

    def __init__(self, dim: int = -1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        return softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LigerReLUSquared(nn.Module):
    """`max(x, 0)^2` (So et al., 2021, arXiv:2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        return relu2(x)


class XIELU(nn.Module):
    """xIELU (Huang and Schlag, 2024, arXiv:2411.13010), with two learned slopes: see
    kernels/activations/xielu.py. beta and eps are saved with them but not learned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.beta: Tensor
        self.eps: Tensor
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self, *_: Any) -> None:
        """Initialise both slopes with 0.8, regardless of the initialisation of matrices."""
        nn.init.constant_(self.alpha_p, math.log(math.expm1(0.8)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(0.8 - 0.5)))
        nn.init.constant_(self.beta, 0.5)
        nn.init.constant_(self.eps, -1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        numbers = self.alpha_p, self.alpha_n, self.beta, self.eps
        return carry_recipe(xielu(x, *numbers), xielu, x, *numbers)
