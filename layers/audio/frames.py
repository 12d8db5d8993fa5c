"""Parts that make frames of sound: convolutions over the columns of spectrograms, and positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.parts.sinusoids import sinusoids
from liger_models.layers.projections.linear import as_wide_as


class Convolution(nn.Module):
    """A convolution over three columns, with zeros at the ends.

    Args:
        inputs, outputs: numbers of channels.
        stride: distance of neighbouring windows.
        axes: 2: over three frequencies, too.
        bias: add a bias.
        apart: each output reads the input of the same number alone.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int = 1,
        axes: int = 1,
        bias: bool = True,
        apart: bool = False,
    ):
        super().__init__()
        self.stride, self.groups = stride, inputs if apart else 1
        self.weight = nn.Parameter(torch.empty(outputs, inputs // self.groups, *(3,) * axes))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, channels, (frequencies,) columns] -> the same of `outputs`, in the weight's dtype.
        Frequencies may also follow the columns.
        """
        weight, bias = self.weight, as_wide_as(self.weight, self.bias)
        convolve = F.conv1d if weight.dim() == 3 else F.conv2d
        return convolve(x.to(weight.dtype), weight, bias, self.stride, padding=1, groups=self.groups)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


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
