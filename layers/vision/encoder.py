"""The encoder of images: a linear layer over patches, and blocks in which those of a picture see one another.

    x = patches @ W^T + b,        [P, D] of all pictures of a batch, without padding
    a norm, in some families
    blocks, as in a language model, but that attention is not causal

Positions are the row and the column of a patch in its picture, by which halves of a head turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.activation_memory import parse_levels
from liger_models.layers.attention_backends import AttentionBackend
from liger_models.layers.blocks import BLOCKS, Block, run_block
from liger_models.layers.linear import as_wide_as
from liger_models.layers.norm import make_norm
from liger_models.layers.offload import Offload
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import PatchSpec, VisionSpec
from liger_models.layers.vision.pictures import Pictures, places_of, windows_of
from liger_models.layers.vision.position_table import PositionTable


class PatchEmbedding(nn.Module):
    """One linear layer over patches, whose weight has the form of a convolution's, as checkpoints have it.

    Args:
        spec: the size of a patch.
        width: that of the result, D.
    """

    def __init__(self, spec: PatchSpec, width: int):
        super().__init__()
        sides = (spec.frames, spec.size, spec.size) if spec.frames > 1 else (spec.size, spec.size)
        self.weight = nn.Parameter(torch.empty(width, spec.channels, *sides))
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches [P, channels * frames * size^2] -> [P, D]."""
        return F.linear(
            patches.to(self.weight.dtype), self.weight.flatten(1), as_wide_as(self.weight, self.bias)
        )

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """As every matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class VisionEncoder(nn.Module):
    """Patches to what the projector reads.

    Args:
        spec: the blocks and their windows.
        attention: the attention backend, see layers/attention_backends.py.
    """

    def __init__(self, spec: VisionSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbedding(spec.patches, spec.hidden_size)
        self.table = None
        if spec.position_table is not None:
            self.table = PositionTable(spec.position_table, spec.hidden_size)
        self.norm_before = None
        if spec.norm_before is not None:
            self.norm_before = make_norm(spec.hidden_size, spec.norm_before)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))

    def forward(self, pictures: Pictures) -> list[Tensor]:
        """What the last layer gives, and what those at `deep` give, from the lowest on: [P, D] each, in the
        order of the pictures' patches.
        """
        merge, device = self.spec.projector.merge, pictures.patches.device
        x, places = self.patch_embed(pictures.patches), places_of(pictures.grids, merge)
        if self.table is not None:
            x = x + self.table(pictures.grids, merge).to(x.dtype)
        if self.norm_before is not None:
            x = self.norm_before(x)
        frames, order = Sequences.of_lengths(pictures.frames, device), None
        seen_by = [frames] * len(self.layers)
        if self.spec.window is not None and self.spec.windowed:
            order, lengths = windows_of(pictures.grids, merge, self.spec.window)
            places = _by_blocks(places.T, order, merge).T
            order = order.to(device, non_blocking=True)
            x, windows = _by_blocks(x, order, merge), Sequences.of_lengths(lengths, device)
            for number in self.spec.windowed:
                seen_by[number] = windows
        frames.axes = places.to(device, non_blocking=True)
        frames.prepare_rotary(tuple(dict.fromkeys(r for b in self.spec.blocks for r in b.mixer.ropes)))
        residual, offload = None, Offload()
        made = []
        for number, (layer, sequences) in enumerate(zip(self.layers, seen_by, strict=True)):
            sequences.rotary = frames.rotary
            x, residual = run_block(layer, x, residual, sequences, offload=offload)
            if number in self.spec.deep:
                x, residual = x if residual is None else x + residual, None
                made.append(x)
        made.insert(0, x if residual is None else x + residual)
        if order is None:
            return made
        back = order.argsort()
        return [_by_blocks(x, back, merge) for x in made]

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Choose what is kept for the backward pass: one level for all layers, or one a layer.

        Raises:
            ValueError: an unknown level, or the wrong number of them.
        """
        levels = levels if isinstance(levels, str) else tuple(levels)
        for layer, level in zip(self.layers, parse_levels(levels, len(self.layers)), strict=True):
            layer.set_activation_memory(level)


def _by_blocks(x: Tensor, order: Tensor, merge: int) -> Tensor:
    """x [P, ...] in another order of its blocks of merge^2 patches."""
    return x.unflatten(0, (-1, merge**2))[order].flatten(0, 1)
