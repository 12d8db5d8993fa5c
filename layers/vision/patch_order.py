"""The order of patches: by time, then by blocks of `merge` times `merge` neighbours.

Blocks follow row by row, and so do the patches within a block, so that patches that are merged are adjacent.
Patches left over at the right and the lower edge, where a side is no multiple of `merge`, come after the
blocks; no token is made of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.specs import (
    PatchSpec,
)

Grid = tuple[int, int, int]


def cut_image(image: Tensor, grid: Grid, merge: int, size: int) -> Tensor:
    """The patches of an image [channels, H, W], [h * w, channels * size^2]."""
    _, h, w = grid
    rows = image[:, : h * size, : w * size].unflatten(2, (w, size)).unflatten(1, (h, size))
    row, column = places_in_picture(*grid, merge).to(image.device, non_blocking=True)
    return rows.permute(1, 3, 0, 2, 4)[row, column].flatten(1)


def whole_blocks(grids: Iterable[Grid], merge: int) -> Tensor | None:
    """Which patches, in the order of `Pictures`, belong to blocks of merge^2, [P] bool on the host; None: all
    of them.
    """
    if all(h % merge == w % merge == 0 for _, h, w in grids):
        return None
    whole = [
        torch.arange(h * w, device="cpu") < (h // merge) * (w // merge) * merge**2
        for t, h, w in grids
        for _ in range(t)
    ]
    return torch.cat(whole)


def cut(picture: Tensor, spec: PatchSpec, merge: int) -> tuple[Tensor, Grid]:
    """A picture [C, height, width], or the frames of a video [F, C, height, width], as the patches of a
    processor. A single frame, and the last one, are repeated until they fill a patch.

    Returns:
        [P, width of a patch], in blocks of `merge` times `merge`; and the grid.

    Raises:
        DataError: height or width is no multiple of `merge` patches.
    """
    frames = picture if picture.dim() == 4 else picture[None]
    missing = -len(frames) % spec.frames
    frames = torch.cat([frames, frames[-1:].expand(missing, *frames.shape[1:])])
    f, c, height, width = frames.shape
    side = spec.size * merge
    if height % side or width % side or c != spec.channels:
        raise DataError(
            f"a picture of {c} channels, {height} times {width}; expected {spec.channels}, and multiples of "
            f"{side}, of {merge} patches side by side"
        )
    t, h, w = f // spec.frames, height // spec.size, width // spec.size
    blocks = frames.view(t, spec.frames, c, h // merge, merge, spec.size, w // merge, merge, spec.size)
    # Time, blocks, patches within a block; channel, frame, pixels.
    patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, spec.width), (t, h, w)


def places_of(grids: Iterable[Grid], merge: int) -> Tensor:
    """The row and the column of each patch in its picture, [2, P], on the host."""
    return torch.cat([places_in_picture(*grid, merge) for grid in grids], dim=1)


def windows_of(grids: Iterable[Grid], merge: int, side: int) -> tuple[Tensor, list[int]]:
    """Every step of time cut into windows of `side` times `side` merged patches, ragged at the right and the
    lower edge.

    Returns:
        The merged patches in the order of windows, [P / merge^2] on the host, and how many patches each
        window has.
    """
    orders, lengths, first = [], [], 0
    for t, h, w in grids:
        order, own = _windows(h // merge, w // merge, side)
        for _ in range(t):
            orders.append(order + first)
            lengths += [n * merge**2 for n in own]
            first += len(order)
    return torch.cat(orders), lengths


@functools.lru_cache(maxsize=256)
def places_in_picture(t: int, h: int, w: int, merge: int) -> Tensor:
    sides = torch.arange(h, device="cpu"), torch.arange(w, device="cpu")
    places = torch.stack(torch.meshgrid(*sides, indexing="ij"))
    within = h // merge * merge, w // merge * merge
    blocks = places[:, : within[0], : within[1]].unflatten(2, (-1, merge)).unflatten(1, (-1, merge))
    over = (places[0] >= within[0]) | (places[1] >= within[1])
    ordered = torch.cat([blocks.permute(0, 1, 3, 2, 4).flatten(1), places[:, over]], dim=1)
    return ordered[:, None].expand(2, t, -1).flatten(1)


@functools.lru_cache(maxsize=256)
def _windows(h: int, w: int, side: int) -> tuple[Tensor, tuple[int, ...]]:
    token = torch.arange(h * w).view(h, w)
    corners = itertools.product(range(0, h, side), range(0, w, side))
    pieces = [token[i : i + side, j : j + side].flatten() for i, j in corners]
    return torch.cat(pieces), tuple(map(len, pieces))
