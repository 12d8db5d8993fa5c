"""The tiles that attention to chosen keys visits, compared with a mask of these keys."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels.attention._tile_sizes import Tiles
from liger_models.kernels.attention._visits import tiles_to_visit


def check_visits(
    tiles: Tiles, mask: Tensor, chosen: Tensor, size: int, bounds: Tensor | None, some_skipped: bool
) -> None:
    """`mask`: [groups, T, T], the chosen keys (columns) of each query up to it. `some_skipped`: expect tiles
    below the diagonal without any.
    """
    seen = _tiles_with(mask, tiles)
    for of_keys, expected in ((False, seen), (True, seen.transpose(1, 2))):
        visits = tiles_to_visit(chosen, size, bounds, tiles, of_keys)
        for found, row in zip(visits.flatten(0, 1), expected.flatten(0, 1), strict=True):
            assert found[1 : 1 + found[0]].tolist() == row.nonzero()[:, 0].tolist()
    assert bool(seen.sum() < _tiles_with(torch.ones_like(mask).tril(), tiles).sum()) == some_skipped


def _tiles_with(mask: Tensor, tiles: Tiles) -> Tensor:
    """Whether tiles of a mask [groups, T, T] have a true element."""
    tokens = mask.shape[-1]
    rows, columns = -(-tokens // tiles.queries), -(-tokens // tiles.keys)
    whole = mask.new_zeros(len(mask), rows * tiles.queries, columns * tiles.keys)
    whole[:, :tokens, :tokens] = mask
    return whole.view(len(mask), rows, tiles.queries, columns, tiles.keys).any(-1).any(2)
