"""Linear layers whose inputs and outputs stay between bounds that are stored with them (Gemma 4's encoder).

    clip(clip(x, input_min, input_max) @ W^T + b, output_min, output_max)

The bounds are numbers that a checkpoint holds, and nothing trains them; fresh ones are infinite. Projections
of one input have bounds of their own, so that each is a matrix product by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.projections.linear import Linear

BOUNDS = {"input_min": -torch.inf, "input_max": torch.inf, "output_min": -torch.inf, "output_max": torch.inf}


class ClippedLinear(nn.Module):
    """A linear layer between bounds. What tools put in the place of `linear` stays between them too.

    Args:
        in_features, out_features: the widths of input and output.
        bias: whether there is one.
    """

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.linear = Linear(in_features, out_features, bias)
        for name, bound in BOUNDS.items():
            self.register_buffer(name, torch.tensor(bound))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        out = self.linear(x.clamp(self.input_min, self.input_max))
        return out.clamp(self.output_min, self.output_max)

    def reset_parameters(self, *_: Any) -> None:
        """Nothing is clipped."""
        for name, bound in BOUNDS.items():
            nn.init.constant_(getattr(self, name), bound)


class ClippedProjections(nn.Module):
    """Several such layers over one input, their outputs side by side.

    Args:
        in_features: the width of the input.
        parts: the widths of the projections, by name.
        bias: whether they have one.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__()
        for name, width in parts.items():
            self.add_module(name, ClippedLinear(in_features, width, bias))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of the parts]."""
        return torch.cat([part(x) for part in self.children()], dim=-1)
