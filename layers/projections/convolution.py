"""The parameters of a convolution, as its checkpoints have them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConvolutionWeights(nn.Module):
    """A weight [outputs, inputs per group, *kernel], and a bias [outputs]. No linear layer, so that PEFT and
    quantisers skip it.

    Args:
        shape: of the weight.
        bias: add a bias.
    """

    bias: Tensor | None

    def __init__(self, *shape: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the weight like a matrix, and the bias with zeros."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:  # PEFT's error shows it, where `all-linear` stands for last names of layers
        return "takes no adapter: name it in exclude_modules"
