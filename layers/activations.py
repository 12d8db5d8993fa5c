"""Activations as modules, for use in any model. Formulas: kernels/activations/."""

from __future__ import annotations

from torch import Tensor, nn

from liger_models.kernels import relu2, softmax


class LigerSoftmax(nn.Module):
    """Softmax over one dimension, in x's dtype, from sums in float32.

    Args:
        dim: the dimension; another than the last costs a copy.
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
