"""Pictures whose patches are pooled before the projector, each by a number of its own (VideoLLaMA 3,
arXiv:2501.13106, section 3).

A block of n times n adjacent patches becomes one vector: the bilinear interpolation at the block's centre,
that is the mean of its patches for n = 2, of its one or four central patches for larger n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.layers.vision.patch_order import Grid, places_in_picture
from liger_models.layers.vision.pictures import Pictures


class PooledPictures(Pictures):
    """The images and videos of a batch, pooled.

    Attributes:
        sides: n of each picture, whose patches come in blocks of n times n.
        kept: mask of the pooled patches of all videos that make tokens, bool on the host; None: all.
    """

    def __init__(
        self, patches: Tensor, grids: list[Grid], images: int, sides: list[int], kept: Tensor | None = None
    ):
        super().__init__(patches, grids, images)
        self.sides, self.kept = sides, kept

    def counts(self, merge: int) -> list[int]:
        counts = [t * h * w // side**2 for (t, h, w), side in zip(self.grids, self.sides, strict=True)]
        if self.kept is None:
            return counts
        of_videos = self.kept.split(counts[self.images :])
        return counts[: self.images] + [int(own.sum()) for own in of_videos]

    def places(self, merge: int) -> Tensor:
        places = (places_in_picture(*grid, side) for grid, side in zip(self.grids, self.sides, strict=True))
        return torch.cat(list(places), dim=1)

    def pooled(self, x: Tensor) -> Tensor:
        """Encoded patches [P, D] -> [tokens, D]."""
        pieces = x.split([t * h * w for t, h, w in self.grids])
        x = torch.cat([_pooled(own, side) for own, side in zip(pieces, self.sides, strict=True)])
        if self.kept is None:
            return x
        images = len(x) - len(self.kept)
        which = torch.cat([torch.arange(images), images + self.kept.nonzero()[:, 0]])
        return x[to_device(which, x.device)]


def _pooled(x: Tensor, side: int) -> Tensor:
    if side == 1:
        return x
    central = slice((side - 1) // 2, side // 2 + 1)
    return x.unflatten(0, (-1, side, side))[:, central, central].mean((1, 2))
