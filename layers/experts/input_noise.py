"""Noise on the inputs of experts and their router, in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class InputNoise(nn.Module):
    """Multiplies x [T, H] by random numbers from 1 - noise to 1 + noise, in training."""

    def __init__(self, noise: float):
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty_like(x).uniform_(1.0 - self.noise, 1.0 + self.noise)

    def extra_repr(self) -> str:
        return f"{self.noise}"
