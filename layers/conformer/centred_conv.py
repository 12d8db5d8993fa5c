"""A depthwise convolution over as many frames after each frame as before it, within each clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from liger_models.layers.conformer.rows import with_rows_after, without_rows_after
from liger_models.layers.projections.convolution import ConvolutionWeights
from liger_models.layers.projections.linear import as_wide_as


class CentredConvolution(ConvolutionWeights):
    """`y[t, c] = bias[c] + sum over k of weight[c, 0, k] * x[t - K // 2 + k, c]`, with zeros around a clip.

    Args:
        channels: their number C.
        width: number of taps K, odd.
        bias: add a bias.
    """

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__(channels, 1, width, bias=bias)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [F, C] -> [F, C], for clips of these lengths."""
        channels, _, width = self.weight.shape
        reach = width // 2
        rows = with_rows_after(x, lengths, [reach] * len(lengths)).to(self.weight.dtype)
        bias = as_wide_as(self.weight, self.bias)
        y = F.conv1d(rows.T[None], self.weight, bias, padding=reach, groups=channels)
        return without_rows_after(y[0].T, lengths, [reach] * len(lengths)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} channels, width={self.weight.shape[2]}"
