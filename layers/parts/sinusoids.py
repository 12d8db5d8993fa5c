"""Positions as sines and cosines, which are computed and not stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_models.kernels._constants import cached_tensors


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
