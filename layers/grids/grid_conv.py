"""Gated convolutions over the grids of patches of pictures (LFM3-VL).

    B, C, u = split(x @ W_in^T);   out = (C * conv(B * u)) @ W_o^T

The convolution is depthwise and has an odd width on both axes, with zeros around the grid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.grids.rows import by_size, in_blocks, in_rows
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GridConvSpec


class GridWeights(nn.Module):
    """The weights of a depthwise convolution, [channels, 1, width, width]."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x [pictures, channels, rows, columns] -> the same."""
        channels, _, width, _ = self.weight.shape
        return F.conv2d(x, self.weight.to(x.dtype), padding=width // 2, groups=channels)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class GridConvolution(nn.Module):
    """Gated convolution over the patches of each picture.

    Args:
        hidden_size: the width D of the hidden states.
        spec: the width of the convolution.
        layer: the index of the layer; unused.
        backend: of attention; unused.
    """

    def __init__(
        self, hidden_size: int, spec: GridConvSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec, self.channels = spec, hidden_size
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias=False)
        self.spatial_conv = GridWeights(hidden_size, spec.width)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [P, D], in the order of layers/vision/patch_order.py -> the same."""
        assert sequences.grids is not None
        grids, merge = sequences.grids.sizes, sequences.grids.merge

        def convolved(same: Tensor, height: int, width: int) -> Tensor:
            raster = in_rows(same, height, width, merge).permute(0, 3, 1, 2)
            return in_blocks(self.spatial_conv(raster).permute(0, 2, 3, 1), merge)

        before, after, u = self.in_proj(x).chunk(3, dim=-1)
        inner = by_size(before * u, grids, convolved)
        return self.out_proj(carry_recipe(after * inner, torch.mul, after, inner))

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: pictures are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per patch: gates and u, the convolution's input and output; with `all` also the gated
        output.
        """
        return itemsize * self.channels * (6 if level == "all" else 5)

    def extra_repr(self) -> str:
        return f"{self.channels} channels, width={self.spec.width}"
