"""Parts that make frames of sound: convolutions over the columns of spectrograms, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.parts.sinusoids import sinusoids
from liger_models.layers.projections.convolution import ConvolutionWeights
from liger_models.layers.projections.linear import as_wide_as
from liger_models.layers.recompute.activation_memory import recompute


class Convolution(ConvolutionWeights):
    """A convolution over three columns, with zeros at the ends.

    Args:
        inputs, outputs: numbers of channels.
        stride: distance of neighbouring windows.
        axes: 2: over three frequencies, too.
        bias: add a bias.
        depthwise: each output reads the input of the same number alone.
        ahead: a window begins with its column, and the zeros at the ends are all after the last; frequencies
            have them on both sides.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int = 1,
        axes: int = 1,
        bias: bool = True,
        depthwise: bool = False,
        ahead: bool = False,
    ):
        groups = inputs if depthwise else 1
        super().__init__(outputs, inputs // groups, *(3,) * axes, bias=bias)
        self.stride, self.groups, self.ahead = stride, groups, ahead

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, channels, (frequencies,) columns] -> the same of `outputs`, in the weight's dtype.
        Frequencies may also follow the columns.
        """
        weight, bias = self.weight, as_wide_as(self.weight, self.bias)
        convolve = F.conv1d if weight.dim() == 3 else F.conv2d
        padding: Any = 1
        if self.ahead:  # columns precede frequencies
            x, padding = F.pad(x, (0, 0, 0, 2)), (0, 1)
        return convolve(x.to(weight.dtype), weight, bias, self.stride, padding, groups=self.groups)


class CumulativeNorm(nn.Module):
    """`(x - mean_t) / sqrt(var_t + eps) * weight` for the columns t of a clip, with one mean over all
    channels and frequencies of the columns up to t, and the mean of the squared distances of each of these
    columns from its own mean; in float32. Only x is kept for the backward pass.

    Args:
        channels: their number C.
        eps: added to the variance.
    """

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, columns, frequencies, C] -> the same, in x's dtype."""
        return recompute(self._normed, x, self.weight)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        count = wide[0, 0].numel() * torch.arange(1, x.shape[1] + 1, device=x.device)[:, None, None]
        wide = wide - wide.sum((2, 3), keepdim=True).cumsum(1) / count
        variance = wide.square().sum((2, 3), keepdim=True).cumsum(1) / count
        return (wide * (variance + self.eps).rsqrt() * weight.to(dtype)).to(x.dtype)

    def reset_parameters(self, *_: object) -> None:
        """Initialise the weight to one."""
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class StoredMoments(nn.Module):
    """`(x - mean) * scale` for each frequency, with stored numbers [bins], which are not trained."""

    mean: Tensor
    scale: Tensor

    def __init__(self, bins: int):
        super().__init__()
        self.register_buffer("mean", torch.empty(bins))
        self.register_buffer("scale", torch.empty(bins))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., bins] -> the same, in the stored numbers' dtype."""
        return (x.to(self.mean.dtype) - self.mean) * self.scale

    def reset_parameters(self, *_: object) -> None:
        """Initialise so that spectrograms stay as they are."""
        self.mean.zero_()
        self.scale.fill_(1.0)


class FrameTable(nn.Module):
    """Stored positions [frames, width], which are not trained."""

    weight: Tensor
    wider_matrices = ("weight",)  # Voxtral's are in float32 next to matrices in bfloat16

    def __init__(self, frames: int, width: int):
        super().__init__()
        self.register_buffer("weight", torch.empty(frames, width))

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, frames, width] plus the positions, in x's dtype."""
        return (x + self.weight[: x.shape[1]]).to(x.dtype)

    def reset_parameters(self, *_: object) -> None:
        """Initialise with sines and cosines."""
        frames, width = self.weight.shape
        self.weight.copy_(sinusoids(frames, width, self.weight.device))


def unpadded(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first `lengths` rows of each entry of x [n, most, D], one after the other, [sum of lengths, D]."""
    if min(lengths) == x.shape[1]:
        return x.flatten(0, 1)
    return torch.cat([own[:length] for own, length in zip(x, lengths, strict=True)])
