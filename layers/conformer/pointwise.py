"""A linear layer whose weight has the shape of a convolution's over one frame, as in checkpoints."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_models.layers.projections.convolution import ConvolutionWeights
from liger_models.layers.projections.linear import as_wide_as


class PointwiseConvolution(ConvolutionWeights):
    """`x @ W^T + b`, with W [outputs, inputs] stored as [outputs, inputs, 1, ...].

    Args:
        inputs, outputs: numbers of channels.
        axes: of the convolution.
        bias: add a bias.
    """

    def __init__(self, inputs: int, outputs: int, axes: int = 1, bias: bool = True):
        super().__init__(outputs, inputs, *(1,) * axes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return F.linear(x, self.weight.flatten(1), as_wide_as(self.weight, self.bias))
