"""A learned table of positions, stretched to the size of each picture.

    x += sum over four taps of weight * table[tap]

The table is a square of side S. Patch i of h stands at i * (S - 1) / max(h - 1, 1) in it, and likewise in
width: corners on corners, what lies between by linear interpolation (Qwen3-VL).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from liger_models.layers.vision.pictures import Grid, places_of


class PositionTable(nn.Module):
    """The positions of patches, from a table of `side` times `side` rows of `width`."""

    def __init__(self, side: int, width: int):
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side**2, width))

    def forward(self, grids: Iterable[Grid], merge: int) -> Tensor:
        """[P, width] float32, for the patches of pictures in the order of `Pictures`."""
        taps, weights = (torch.cat(x) for x in zip(*(self._taps(grid, merge) for grid in grids), strict=True))
        device = self.weight.device
        taps, weights = taps.to(device, non_blocking=True), weights.to(device, non_blocking=True)
        rows = (self.weight[tap] * weight[:, None] for tap, weight in zip(taps.T, weights.T, strict=True))
        return functools.reduce(torch.add, rows)

    def _taps(self, grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
        return _taps(grid, merge, self.side)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """As every matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


@functools.lru_cache(maxsize=256)
def _taps(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The rows of the table by which each patch stands, [P, 4], and their weights, on the host."""
    (_, h, w), places = grid, places_of([grid], merge)
    (top, low), (left, right) = (_axis(x, n, side) for x, n in zip(places, (h, w), strict=True))
    taps = [i * side + j for i, _ in (top, low) for j, _ in (left, right)]
    weights = [a * b for _, a in (top, low) for _, b in (left, right)]
    return torch.stack(taps, 1), torch.stack(weights, 1)


def _axis(place: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two neighbours of each place in the table, and their weights in float32."""
    at = place.float() * (side - 1) / max(size - 1, 1)
    first = at.floor()
    return [
        ((first.long() + step).clamp(max=side - 1), (1 - (at - first - step).abs()).clamp(min=0))
        for step in (0, 1)
    ]
