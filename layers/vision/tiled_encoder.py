"""The encoder of tiled images (Llama 3.2 Vision): tiled.py has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks import BLOCKS, Block, run_block
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import TiledVisionSpec
from liger_models.layers.vision.encoder import PatchEmbedding


class TiledImages:
    """Images [batch, images] of a batch; rows with fewer images are padded.

    Attributes:
        pixels: [batch, images, tiles, channels, size, size].
        ratios: index of each image's arrangement of tiles, [batch, images], from 1; 0: no image.
        filled: mask of used tiles, [batch, images, tiles].
    """

    def __init__(self, pixels: Tensor, ratios: Tensor, filled: Tensor):
        self.pixels, self.ratios, self.filled = pixels, ratios, filled


class TiledEncoder(nn.Module):
    """Encode images tile by tile.

    Args:
        spec: the parts.
        attention: the attention backend.

    Raises:
        ValueError: a selected layer does not exist.
    """

    def __init__(self, spec: TiledVisionSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        width = spec.hidden_size
        if not set(spec.taken) <= set(range(len(spec.blocks))):
            raise ValueError(f"layers {spec.taken} are taken, of {len(spec.blocks)}")
        self.spec = spec
        self.patch_embed = PatchEmbedding(spec.patches, width)
        self.class_token = nn.Parameter(torch.empty(width))
        self.before = OfTile(spec, width)
        self.place = PlaceInTiles(spec)
        self.after = OfTile(spec, width)
        self.norm_before, self.norm_after = (make_norm(width, spec.norm) for _ in range(2))

        def blocks(specs: Sequence[Any], first: int) -> nn.ModuleList:
            made = [BLOCKS[b.topology](width, b, first + i, attention) for i, b in enumerate(specs)]
            return nn.ModuleList(made)

        self.local, self.overall = blocks(spec.blocks, 0), blocks(spec.global_blocks, len(spec.blocks))

    @property
    def layers(self) -> list[Block]:
        """All layers, in order of execution."""
        return cast(Any, [*self.local, *self.overall])

    def forward(self, pictures: TiledImages) -> tuple[Tensor, ...]:
        """Return features, [batch * images, tiles, P, (1 + taken layers) * D]."""
        spec, size = self.spec, self.spec.patches.size
        ratios = pictures.ratios.flatten().clamp(0, spec.ratios)
        side = spec.image_size // size
        tiles = pictures.pixels.flatten(0, 1)[..., : side * size, : side * size]
        patches = tiles.unflatten(4, (side, size)).unflatten(3, (side, size)).permute(0, 1, 3, 5, 2, 4, 6)
        x = self.patch_embed(patches.flatten(4).flatten(2, 3))  # [images, tiles, P - 1, D]
        x = x + self.before(ratios)
        x = torch.cat([self.class_token.to(x.dtype).expand(*x.shape[:2], 1, -1), x], dim=2)
        x = self.norm_before((x + self.place(ratios)).to(x.dtype))
        images, count, patches_of_tile, _ = x.shape
        x = F.pad(x, (0, 0, 0, -patches_of_tile % 8))
        length = x.shape[2]
        real = torch.arange(length, device=x.device) < patches_of_tile
        pads = ~(pictures.filled.flatten(0, 1)[:, :, None] & real).flatten(1)
        # Move padding to the end: the tokens visible to a token are then one range.
        order = pads.byte().argsort(dim=1, stable=True)
        sequences = Sequences.from_call((images, count * length), x.device)
        sequences.visibility = Visibility(sequences.documents, padding=pads.gather(1, order).flatten())
        first = torch.arange(0, order.numel(), count * length, device=x.device)[:, None]
        order = (order + first).flatten()
        blocks = (*spec.blocks, *spec.global_blocks)
        sequences.prepare_rotary(tuple(dict.fromkeys(rope for b in blocks for rope in b.ropes)))
        offload, taken = Offload(), {}
        x, residual = x.flatten(0, 2)[order], None
        for number, layer in enumerate(self.local):
            x, residual = run_block(cast(Any, layer), x, residual, sequences, offload=offload)
            if number in spec.taken:
                x, residual = x if residual is None else x + residual, None
                taken[number] = x
        x = self.norm_after(x if residual is None else x + residual)
        after = self.after(ratios).expand(-1, -1, length, -1).flatten(0, 2)  # its gradient is one sum
        x, residual = x + after[order], None
        for layer in self.overall:
            x, residual = run_block(cast(Any, layer), x, residual, sequences, offload=offload)
        x = x if residual is None else x + residual
        made = [x, torch.stack([taken[number] for number in spec.taken], dim=-1).flatten(1)]
        features = torch.cat(made, dim=1)[order.argsort()]
        return (features.view(images, count, length, -1)[:, :, :patches_of_tile],)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on all layers."""
        set_levels(self.layers, levels)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the class token like a matrix."""
        nn.init.normal_(self.class_token, 0.0, std, generator)


class OfTile(nn.Module):
    """`tanh(gate) * weight[ratio, tile]`."""

    def __init__(self, spec: TiledVisionSpec, width: int):
        super().__init__()
        self.tiles = spec.tiles
        self.gate = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(spec.ratios + 1, spec.tiles * width))

    def forward(self, ratios: Tensor) -> Tensor:
        """ratios [N] -> [N, tiles, 1, D]."""
        return self.gate.tanh() * self.weight[ratios].unflatten(1, (self.tiles, 1, -1))

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Close the gate."""
        nn.init.zeros_(self.gate)
        nn.init.normal_(self.weight, 0.0, std, generator)


class PlaceInTiles(nn.Module):
    """`(1 - tanh(gate)) * embedding[place] + tanh(gate) * weight[ratio, tile, place]`."""

    def __init__(self, spec: TiledVisionSpec):
        super().__init__()
        places = (spec.image_size // spec.patches.size) ** 2 + 1
        self.tiles = spec.tiles
        self.gate = nn.Parameter(torch.empty(1))
        self.embedding = nn.Parameter(torch.empty(places, spec.hidden_size))
        self.weight = nn.Parameter(torch.empty(spec.ratios + 1, spec.tiles * places * spec.hidden_size))

    def forward(self, ratios: Tensor) -> Tensor:
        """ratios [N] -> [N, tiles, P, D], in at least float32."""
        in_tiles = self.weight[ratios].unflatten(1, (self.tiles, *self.embedding.shape))
        # Compute the gate's gradient as one sum: the difference of two rounded ones would lose most digits.
        embedding, gate = at_least_float32(self.embedding), at_least_float32(self.gate).tanh()
        return embedding + gate * (in_tiles - embedding)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Close the gate."""
        nn.init.zeros_(self.gate)
        nn.init.normal_(self.embedding, 0.0, std, generator)
        nn.init.normal_(self.weight, 0.0, std, generator)
