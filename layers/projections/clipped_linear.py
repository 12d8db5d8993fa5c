"""Linear layers that clip their inputs and outputs to stored bounds (Gemma 4's encoder).

    clip(clip(x, input_min, input_max) @ W^T + b, output_min, output_max)

The bounds are scalars stored in the checkpoint and are not trained; fresh ones are infinite. Projections of
one input have bounds of their own, so that each is a separate matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.projections.linear import Linear

BOUNDS = {"input_min": -torch.inf, "input_max": torch.inf, "output_min": -torch.inf, "output_max": torch.inf}


class ClippedLinear(nn.Module):
    """A linear layer between two clips. A layer that a tool puts in the place of `linear` is clipped, too.

    Args:
        in_features, out_features: the widths of input and output.
        bias: add a bias.
    """

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.linear, self.widths = Linear(in_features, out_features, bias), in_features + out_features
        for name, bound in BOUNDS.items():
            self.register_buffer(name, torch.tensor(bound))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        out = self.linear(x.clamp(self.input_min, self.input_max))
        return out.clamp(self.output_min, self.output_max)

    def clip_bytes(self, itemsize: int) -> int:
        """Bytes per row that the clips keep: the clipped input, and the output before its clip."""
        return itemsize * self.widths

    def reset_parameters(self, *_: Any) -> None:
        """Set infinite bounds, which clip nothing."""
        for name, bound in BOUNDS.items():
            nn.init.constant_(getattr(self, name), bound)


class ClippedProjections(nn.Module):
    """Several clipped layers over one input, with concatenated outputs.

    Args:
        in_features: the width of the input.
        parts: the widths of the projections, by name.
        bias: add biases.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__()
        self.names = tuple(parts)  # transformers has these layers elsewhere
        for name, width in parts.items():
            self.add_module(name, ClippedLinear(in_features, width, bias))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of the parts]."""
        return torch.cat([getattr(self, name)(x) for name in self.names], dim=-1)
