"""The gated norm after a recurrent mixer's heads: kernels/norms/gated_rms_norm.py with its weight."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import gated_rms_norm
from liger_models.layers.recompute.activation_memory import carry_recipe


class GatedNormalisation(nn.Module):
    """`weight * x / rms(x) * act(gate)` over groups of channels: kernels/norms/gated_rms_norm.py with its
    weight.

    Args:
        size: the number of weights: the width of a group, whose weight all groups share, or all channels.
        eps: added to the mean square.
        group_size: the width of a group. Default: `size`.
        gate_first: multiply by the gate before the norm.
        activation: of the gate, "silu" or "sigmoid".
        cast: where results are rounded, as in `gated_rms_norm`.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        group_size: int | None = None,
        gate_first: bool = False,
        activation: str = "silu",
        cast: str = "llama",
    ):
        super().__init__()
        self.eps, self.group_size, self.gate_first = eps, group_size or size, gate_first
        self.activation, self.cast = activation, cast
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self, *_: Any) -> None:
        """Set the weight to one, for any initialisation of matrices."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, channels] -> [T, channels]."""
        make = functools.partial(
            gated_rms_norm,
            eps=self.eps,
            group_size=self.group_size,
            gate_first=self.gate_first,
            activation=self.activation,
            cast=self.cast,
        )
        return carry_recipe(make(x, gate, self.weight), make, x, gate, self.weight, late=True)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
