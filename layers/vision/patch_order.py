"""The order of patches: by time, then by blocks of `merge` times `merge` neighbours.

Blocks are ordered row by row, and so are the patches within a block: patches to be merged are adjacent. If a
side is not a multiple of `merge`, the remaining patches at the right and bottom edges follow the blocks; they
yield no tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device
from liger_models.layers.specs import (
    PatchSpec,
)

Grid = tuple[int, int, int]


def cut_image(image: Tensor, grid: Grid, merge: int, size: int) -> Tensor:
    """Patches of an image [channels, H, W], [h * w, channels * size^2]; or of each of several images of one
    size, [images, channels, H, W], one image after the other.
    """
    _, h, w = grid
    images = image if image.dim() == 4 else image[None]
    rows = images[..., : h * size, : w * size].unflatten(3, (w, size)).unflatten(2, (h, size))
    row, column = to_device(places_in_picture(*grid, merge), image.device)
    return rows.permute(0, 2, 4, 1, 3, 5)[:, row, column].flatten(2).flatten(0, 1)


def in_blocks(patches: Tensor, grids: Iterable[Grid], spec: PatchSpec, merge: int) -> Tensor:
    """Reorder patches [P, width] of pictures from rows to blocks, and the pixels of each from [frame,
    channel, row, column] to channels first.
    """
    first, order = 0, []
    for t, h, w in grids:
        row, column = places_in_picture(1, h, w, merge)
        for _ in range(t):
            order.append(row * w + column + first)
            first += h * w
    which = to_device(torch.cat(order), patches.device)
    return patches[which].unflatten(1, (spec.frames, spec.channels, -1)).transpose(1, 2).flatten(1)


def channels_first(spec: PatchSpec, patches: Tensor) -> Tensor:
    """Reorder the pixels of patches [P, size * size * channels] to [P, channels * size * size]."""
    return patches.unflatten(1, (spec.size, spec.size, spec.channels)).permute(0, 3, 1, 2).flatten(1)


def whole_blocks(grids: Iterable[Grid], merge: int) -> Tensor | None:
    """Mask of the patches, in the order of `Pictures`, in full blocks of merge^2, [P] bool on the host; None:
    all.
    """
    if all(h % merge == w % merge == 0 for _, h, w in grids):
        return None
    whole = [
        torch.arange(h * w, device="cpu") < (h // merge) * (w // merge) * merge**2
        for t, h, w in grids
        for _ in range(t)
    ]
    return torch.cat(whole)


def cut(picture: Tensor, spec: PatchSpec, merge: int, raster: bool = False) -> tuple[Tensor, Grid]:
    """Cut a picture [C, height, width], or the frames of a video [F, C, height, width], into patches. A
    single frame, or the last one, is repeated to fill a patch.

    Returns:
        [P, patch width], in blocks of `merge` times `merge`, or as `GridPictures.raster` says; and the grid.

    Raises:
        DataError: height or width is not a multiple of `merge` patches.
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
    if raster:
        rows = frames.view(t, spec.frames, c, h, spec.size, w, spec.size)
        return rows.permute(0, 3, 5, 1, 2, 4, 6).reshape(t * h * w, spec.width), (t, h, w)
    blocks = frames.view(t, spec.frames, c, h // merge, merge, spec.size, w // merge, merge, spec.size)
    # Time, blocks, patches within a block; channel, frame, pixels.
    patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, spec.width), (t, h, w)


def places_of(grids: Iterable[Grid], merge: int) -> Tensor:
    """The row and column of each patch in its picture, [2, P], on the host."""
    return torch.cat([places_in_picture(*grid, merge) for grid in grids], dim=1)


def windows_of(grids: Iterable[Grid], merge: int, side: int) -> tuple[Tensor, list[int]]:
    """Divide every time step into windows of `side` times `side` merged patches, smaller at the right and
    bottom edges.

    Returns:
        The merged patches in the order of windows, [P / merge^2] on the host, and the number of patches per
        window.
    """
    orders, lengths, first = [], [], 0
    for t, h, w in grids:
        order, own = _windows(h // merge, w // merge, side)
        for _ in range(t):
            orders.append(order + first)
            lengths += [n * merge**2 for n in own]
            first += len(order)
    return torch.cat(orders), lengths


@cached_tensors()
def places_in_picture(t: int, h: int, w: int, merge: int) -> Tensor:
    sides = torch.arange(h, device="cpu"), torch.arange(w, device="cpu")
    places = torch.stack(torch.meshgrid(*sides, indexing="ij"))
    within = h // merge * merge, w // merge * merge
    blocks = places[:, : within[0], : within[1]].unflatten(2, (-1, merge)).unflatten(1, (-1, merge))
    over = (places[0] >= within[0]) | (places[1] >= within[1])
    ordered = torch.cat([blocks.permute(0, 1, 3, 2, 4).flatten(1), places[:, over]], dim=1)
    return ordered[:, None].expand(2, t, -1).flatten(1)


@cached_tensors()
def _windows(h: int, w: int, side: int) -> tuple[Tensor, tuple[int, ...]]:
    token = torch.arange(h * w, device="cpu").view(h, w)
    corners = itertools.product(range(0, h, side), range(0, w, side))
    pieces = [token[i : i + side, j : j + side].flatten() for i, j in corners]
    return torch.cat(pieces), tuple(map(len, pieces))
