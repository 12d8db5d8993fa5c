"""The gated norm behind a recurrent mixer's heads: kernels/norms/gated_rms_norm.py with its weight."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import gated_rms_norm
from liger_models.layers.recompute.activation_memory import carry_recipe


class GatedNormalisation(nn.Module):
    """`weight * x / rms(x) * silu(gate)` over each head: kernels/norms/gated_rms_norm.py with its weight.

    Args:
        head_dim: the width of a head.
        eps: added to the mean square.
    """

    def __init__(self, head_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(head_dim))

    def reset_parameters(self, *_: Any) -> None:
        """A factor of one, whatever matrices start with."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, heads * head_dim] -> [T, heads * head_dim]."""
        make = functools.partial(gated_rms_norm, eps=self.eps, group_size=len(self.weight))
        return carry_recipe(make(x, gate, self.weight), make, x, gate, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
