"""Images of any size as tiles of one size, and the tokens made of their features (AnyRes; LLaVA-OneVision,
arXiv:2408.03326, section 3.2).

    one image:        (in LLaVA-NeXT, arXiv:2310.03744, every image)
                      the downscaled image, n * n features, row by row; then the grid of its tiles, cropped to
                      the image, reduced if there are many tiles, with `newline` after each row
    several images:   each downscaled image, then `newline`
    a video:          each frame at half its height and width, then a final `newline`; or each frame as it
                      was pooled before (LLaVA-NeXT-Video)

A token of a reduced grid is a weighted mean of up to four features, its taps: linear interpolation with
pixels as areas. Everything follows from the sizes, and is computed on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device

NEWLINE = -1


class Taps(NamedTuple):
    """Indices of each token's features, [F, 4], which may be `NEWLINE`, and their weights, [F, 4] float32."""

    features: Tensor
    weights: Tensor


class Newline(nn.Module):
    """A learned feature [H] that ends rows; computes tokens from features and itself."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor, pictures: Sequence[Taps], sizes: Sequence[int]) -> Tensor:
        """x [N, H], the features of pictures of these sizes -> [F, H]."""
        # In float32 before rows are picked: gradients add up in the dtype of what is picked from, one by one,
        # and many rows of an image end with the same feature.
        rows = torch.cat([x, self.weight.to(x.dtype)[None]]).float()
        first, taps = 0, []
        for picture, size in zip(pictures, sizes, strict=True):
            taps.append(torch.where(picture.features == NEWLINE, len(x), picture.features + first))
            first += size
        which = to_device(torch.cat(taps), x.device)
        weights = to_device(torch.cat([picture.weights for picture in pictures]), x.device)
        weighted = (rows[tap] * weight[:, None] for tap, weight in zip(which.T, weights.T, strict=True))
        return functools.reduce(torch.add, weighted).to(x.dtype)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


def best_resolution(height: int, width: int, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the resolution that keeps most of an image's pixels; among equals the smallest, then the
    first.
    """

    def worth(resolution: tuple[int, int]) -> tuple[int, int]:
        h, w = resolution
        scale = min(w / width, h / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        return kept, kept - h * w

    return max(resolutions, key=worth)


@cached_tensors()
def of_tiles(n: int, rows: int, columns: int, height: int, width: int, most: int | None) -> Taps:
    """Taps of an image of `height` times `width` pixels in `rows` times `columns` tiles of n * n features; a
    grid of more than `most` tiles is reduced (None: none is).
    """
    tiles = torch.arange(rows * columns * n * n, device="cpu").view(rows, columns, n, n)
    grid = _unpadded(n * n + tiles.transpose(1, 2).reshape(rows * n, columns * n), height, width)
    ratio = 1.0 if most is None else math.sqrt(grid.numel() / (most * n * n))
    h, w = grid.shape
    taps = _shrunk(grid, int(h // ratio), int(w // ratio)) if ratio > 1.1 else _as_is(grid)
    lines = [torch.cat([x, end], 1) for x, end in zip(taps, _ends(len(taps.features)), strict=True)]
    return _joined(_as_is(torch.arange(n * n, device="cpu")), Taps(*(x.flatten(0, 1) for x in lines)))


@cached_tensors()
def of_whole(n: int) -> Taps:
    """Taps of one of several images of n * n features."""
    return _joined(_as_is(torch.arange(n * n, device="cpu")), _end())


@cached_tensors()
def of_video(n: int, frames: int, pool: int | None = None) -> Taps:
    """Taps of a video whose frames have n * n features each, after averaging `pool` times `pool`."""
    if pool is not None:
        return _as_is(torch.arange(frames * (n // pool) ** 2, device="cpu"))
    half = math.ceil(n / 2)
    pieces = [_shrunk(grid, half, half) for grid in torch.arange(frames * n * n, device="cpu").view(-1, n, n)]
    return _joined(*(Taps(*(x.flatten(0, 1) for x in piece)) for piece in pieces), _end())


def _unpadded(grid: Tensor, height: int, width: int) -> Tensor:
    """Crop the grid to the image's aspect ratio, removing the padding."""
    h, w = grid.shape
    if width / height > w / h:
        cut = (h - int(round(height * (w / width), 7))) // 2
        return grid[cut : h - cut]
    cut = (w - int(round(width * (h / height), 7))) // 2
    return grid[:, cut : w - cut]


def _shrunk(grid: Tensor, height: int, width: int) -> Taps:
    (top, low), (left, right) = (_axis(*sizes) for sizes in zip(grid.shape, (height, width), strict=True))
    taps = [grid[i][:, j] for i, _ in (top, low) for j, _ in (left, right)]
    weights = [a[:, None] * b for _, a in (top, low) for _, b in (left, right)]
    return Taps(torch.stack(taps, -1), torch.stack(weights, -1))


def _axis(old: int, new: int) -> list[tuple[Tensor, Tensor]]:
    """The two neighbours of each new position, and their weights."""
    at = ((torch.arange(new, device="cpu") + 0.5) * (old / new) - 0.5).clamp(min=0)
    first = at.floor()
    return [(first.long(), 1 - (at - first)), ((first.long() + 1).clamp(max=old - 1), at - first)]


def _as_is(grid: Tensor) -> Taps:
    one = torch.tensor([1.0, 0.0, 0.0, 0.0], device="cpu")
    return Taps(grid[..., None].expand(*grid.shape, 4), one.expand(*grid.shape, 4))


def _end() -> Taps:
    return _as_is(torch.full((1,), NEWLINE, device="cpu"))


def _ends(rows: int) -> Taps:
    return _as_is(torch.full((rows, 1), NEWLINE, device="cpu"))


def _joined(*pieces: Taps) -> Taps:
    return Taps(*(torch.cat(x) for x in zip(*pieces, strict=True)))
