"""Parts that make frames of sound: convolutions over the columns of spectrograms, and positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._constants import cached_tensors


class Convolution(nn.Module):
    """A convolution over three columns, with a bias and zeros at the ends.

    Args:
        inputs, outputs: numbers of channels.
        stride: distance of neighbouring windows.
        axes: 2: over three frequencies, too.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, axes: int = 1):
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *(3,) * axes))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, channels, (frequencies,) columns] -> the same of `outputs`, in the weight's dtype."""
        weight = self.weight
        convolve = F.conv1d if weight.dim() == 3 else F.conv2d
        return convolve(x.to(weight.dtype), weight, self.bias.to(weight.dtype), self.stride, padding=1)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        nn.init.zeros_(self.bias)


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


def sinusoids(frames: int, width: int, device: torch.device | str) -> Tensor:
    """Sines, and then cosines, of each position times frequencies from 1 to 1/10000, [frames, width] in
    float32.
    """
    steps = torch.arange(width // 2, device=device).float()
    rates = torch.exp(-math.log(10000) / max(1, width // 2 - 1) * steps)
    angles = torch.arange(frames, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


@cached_tensors(8)
def cached_sinusoids(frames: int, width: int, device: torch.device) -> Tensor:
    """The same, computed on the CPU, so that every device has the same bits."""
    return sinusoids(frames, width, "cpu").to(device)


def unpadded(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first `lengths` rows of each entry of x [n, most, D], one after the other, [sum of lengths, D]."""
    if min(lengths) == x.shape[1]:
        return x.flatten(0, 1)
    return torch.cat([own[:length] for own, length in zip(x, lengths, strict=True)])
