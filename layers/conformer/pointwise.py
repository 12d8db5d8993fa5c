"""A linear layer whose weight has the shape of a convolution's over one frame, as in checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.projections.linear import as_wide_as


class PointwiseConvolution(nn.Module):
    """`x @ W^T + b`, with W [outputs, inputs] stored as [outputs, inputs, 1, ...].

    Args:
        inputs, outputs: numbers of channels.
        axes: of the convolution.
        bias: add a bias.
    """

    def __init__(self, inputs: int, outputs: int, axes: int = 1, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *(1,) * axes))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return F.linear(x, self.weight.flatten(1), as_wide_as(self.weight, self.bias))

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:  # PEFT's error shows it, where `all-linear` stands for last names of layers
        return "takes no adapter: name it in exclude_modules"
