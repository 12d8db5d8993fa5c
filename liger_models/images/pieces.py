"""Pictures in the conversations of scenes.py, and the parts that processors make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.images.sounds import Sound
from liger_models.layers.specs import ModelSpec, PartlyHiddenTiles, VisionSpec
from liger_models.layers.vision.grid_inputs import tiles_and_tokens

Piece = Any  # int | Image | Video | Sound
Document = Sequence[Piece]


@dataclass(frozen=True)
class Image:
    """An image, with height and width in patches."""

    height: int
    width: int


@dataclass(frozen=True)
class Video:
    """A video, with its number of time steps."""

    steps: int
    height: int
    width: int
    seconds: float = 1.0


def crops_of(piece: Any) -> int:
    """The number of crops of an image: 0 to 2, by its height."""
    return int(piece.height) // 8 % 3


def slices_of(piece: Any, merge: int) -> list[list[tuple[int, int]]]:
    """The rows of slices of an image or a frame, (height, width) in patches each: none, or one or two rows of
    two, by its height. The last may be smaller than the others.
    """
    rows = [[(merge, 2 * merge)] * 2 for _ in range(crops_of(piece))]
    return [*rows[:-1], [*rows[-1][:-1], (merge, merge)]] if rows else []


def tokens_of_tiles(spec: VisionSpec, piece: Any) -> int:
    """The number of tokens of such an image."""
    assert isinstance(spec.pictures, PartlyHiddenTiles)
    side = spec.pictures.size // spec.patches.size
    return len(tiles_and_tokens(side, *tiles_of(piece, side))[1])


def tiles_of(piece: Any, side: int) -> tuple[int, int, int, int]:
    """Rows and columns of tiles of side^2 patches that an image needs, and its height and width: odd and even
    ones.
    """
    h, w = piece.height, max(1, piece.width - piece.height // 2 % 2)
    return -(-h // side), -(-w // side), h, w


def kept_of(video: Video) -> Tensor:
    """Mask of the tokens of a video pooled by 2 that a processor keeps."""
    return torch.arange(video.steps * video.height * video.width // 4) % 5 != 3


def windows_of(image: Image, side: int) -> list[Tensor]:
    """The patches of each token, of the whole image and of its crops side by side, by blocks of four. Each
    has `side` times `side` patches; the first column of a crop is left out, as are patches that overlap.
    """
    crops = 1 + crops_of(image)
    patches = torch.arange((1 + crops) * side**2).view(1 + crops, side, side)
    grids = patches[0], patches[1:, :, 1:].transpose(0, 1).flatten(1)
    padded = (F.pad(grid, (0, -grid.shape[1] % 2, 0, -grid.shape[0] % 2), value=-1) for grid in grids)
    return [
        grid.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).transpose(1, 2).reshape(-1, 4) for grid in padded
    ]


def documents_with_media(spec: ModelSpec) -> list[Document]:
    """Two documents: one with two images, one with an image of another size, whose sides are multiples of the
    projector's merge size; or with sounds in their place, or next to them.
    """
    if spec.vision is None:
        return [[5, Sound(23), 7, Sound(9), 9], [11, Sound(14), 10]]
    heard = [] if spec.audio is None else [Sound(23), 3]
    merge = getattr(spec.vision, "merge", 2)
    return [
        [5, Image(2 * merge, merge), 7, *heard, Image(merge, 3 * merge), 9],
        [11, Image(3 * merge, 2 * merge), 10],
    ]
