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


def sinusoids_by_distance(frames: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sines and cosines, in turn, of each distance from `frames - 1` down to `1 - frames`, times frequencies
    10000^(-2i / width), [2 frames - 1, width], computed in float32 (Transformer-XL, arXiv:1901.02860, section
    3.3).
    """
    most = 64 << max(0, (frames - 1) // 64).bit_length()  # few tables for many lengths
    return _by_distance(most, width, device, dtype)[most - frames : most + frames - 1]


@cached_tensors(8)
def _by_distance(frames: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same, computed on the CPU, so that every device has the same bits."""
    rates = 1.0 / (10000.0 ** (torch.arange(0, width, 2, device="cpu").float() / width))
    angles = torch.arange(frames - 1, -frames, -1, device="cpu").float()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(device, dtype)


@cached_tensors(8)
def cached_sinusoids(frames: int, width: int, device: torch.device) -> Tensor:
    """The same, computed on the CPU, so that every device has the same bits."""
    return sinusoids(frames, width, "cpu").to(device)
