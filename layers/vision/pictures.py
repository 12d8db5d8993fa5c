"""The images and videos of a batch, as one row of patches.

Pictures of all sizes are concatenated without padding, like documents in `Sequences`. A grid (t, h, w) holds
the number of patches in time, height and width; an image has one time step. patch_order.py defines the order
of the patches, and processor_inputs.py makes `Pictures` from the outputs of a processor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.layers.grids.anyres import Taps, of_whole
from liger_models.layers.specs import (
    AnyresPictures,
    MaskedPictures,
    PartlyHiddenTiles,
    SquarePictures,
    VisionSpec,
    WindowedPictures,
)
from liger_models.layers.vision.patch_order import Grid, places_in_picture, places_of


class Pictures:
    """The images and videos of a batch.

    Attributes:
        patches: [P, width] pixels.
        grids: (t, h, w) of each picture, in patches; the images first, then the videos.
        images: the number of images.
        seconds: duration of a time step of each video.
        extra: the number of tokens of each picture in addition to its patches'.
        clips: the time steps of a video share their tokens, and attend to one another.
        joined: they attend to one another.
        paired: two consecutive time steps of a video share their tokens.
        rows_end: an image has a token after each row, one before and one after all.
        shown: for each image whether it has tokens, [images] on the device; None: all have. Images without
            are encoded for nothing, but their number is not known on the host.
    """

    def __init__(
        self,
        patches: Tensor,
        grids: list[Grid],
        images: int,
        seconds: list[float] | None = None,
        extra: int = 0,
        clips: bool = False,
        joined: bool = False,
        paired: bool = False,
        rows_end: bool = False,
        shown: Tensor | None = None,
    ):
        self.patches, self.grids, self.images, self.extra = patches, grids, images, extra
        self.clips, self.joined, self.paired = clips, joined or clips, paired
        self.rows_end, self.shown = rows_end, shown
        self.seconds = seconds or [1.0] * (len(grids) - images)

    @property
    def token_grids(self) -> list[Grid]:
        """Like `grids`, with the time steps that tokens have."""
        steps = 2 if self.paired else 1
        videos = [(t // steps, h, w) for t, h, w in self.grids[self.images :]]
        return self.grids[: self.images] + videos

    @property
    def lengths(self) -> list[int]:
        """Numbers of patches that attend to one another: of each image, and of each time step of a video or
        each video.
        """
        if self.joined:
            return [t * h * w for t, h, w in self.grids]
        return [h * w for t, h, w in self.grids for _ in range(t)]

    def places(self, merge: int) -> Tensor:
        """The row and column of each patch in its picture, [2, P], on the host."""
        return places_of(self.grids, merge)

    def steps(self) -> Tensor:
        """The time step of each patch in its picture, [P], on the host."""
        of_each = [torch.arange(t, device="cpu").repeat_interleave(h * w) for t, h, w in self.grids]
        return torch.cat(of_each)

    def pooled(self, x: Tensor) -> Tensor:
        """Encoded patches [P, D] as the projector reads them."""
        return x

    def steps_apart(self) -> Pictures:
        """The same pictures, with each time step of a video as a separate picture."""
        videos = [(1, h, w) for t, h, w in self.grids[self.images :] for _ in range(t)]
        return Pictures(self.patches, self.grids[: self.images] + videos, self.images)

    def counts(self, merge: int) -> list[int]:
        """The number of tokens of each picture, one per `merge` times `merge` patches."""
        grids = [(1 if self.clips else t, h // merge, w // merge) for t, h, w in self.token_grids]
        if self.rows_end:
            return [h * (w + 1) + 2 for _, h, w in grids]
        return [t * h * w + self.extra for t, h, w in grids]

    def features(self, merge: int) -> tuple[int, int]:
        """The number of tokens of all images, and of all videos."""
        counts = self.counts(merge)
        return sum(counts[: self.images]), sum(counts[self.images :])


class TiledPictures(Pictures):
    """Images as tiles of one size, and videos as frames of that size.

    Attributes:
        taps: per picture, the interpolation that makes its tokens: see layers/grids/anyres.py.
        sizes: per picture, the number of features.
    """

    def __init__(
        self,
        patches: Tensor,
        side: int,
        taps: list[Taps],
        tiles: list[int],
        images: int,
        pool: int | None = None,
        token_side: int | None = None,
    ):
        super().__init__(patches, [(1, side, side)] * sum(tiles), images)
        self.taps, self.side, self.pool = taps, side, pool
        side = token_side or side
        frame = side**2 if pool is None else (side // pool) ** 2
        self.sizes = [count * (side**2 if number < images else frame) for number, count in enumerate(tiles)]

    def pooled(self, x: Tensor) -> Tensor:
        """Encoded patches [P, D], of frames the means of blocks."""
        own = sum(self.sizes[: self.images])
        if self.pool is None or own == len(x):
            return x
        tiles, frames = x[:own], x[own:].unflatten(0, (-1, self.side, self.side))
        blocks = F.avg_pool2d(frames.permute(0, 3, 1, 2), self.pool).permute(0, 2, 3, 1)
        return torch.cat([tiles, blocks.flatten(0, 2)])

    def counts(self, merge: int) -> list[int]:
        return [len(taps.features) for taps in self.taps]


class PicturesInWindows(Pictures):
    """Pictures of one or more crops each.

    Attributes:
        windows: numbers of the patches that make each token, [F, n] on the host, -1 for none.
        sizes: the number of tokens of each picture.
    """

    def __init__(self, patches: Tensor, grids: list[Grid], windows: Tensor, sizes: list[int]):
        super().__init__(patches, grids, len(sizes))
        self.windows, self.sizes = windows, sizes

    def counts(self, merge: int) -> list[int]:
        return self.sizes


class TilesOfPictures(PicturesInWindows):
    """Images as tiles, some with patches of padding that share a token with the image's.

    Attributes:
        patches: of each tile those of the image, as in `grids`, and then those of padding.
        hidden: the number of the latter of each tile, to which no token attends.
        windows: of tokens without patches `ROW_END` or `SEPARATOR` everywhere.
    """

    ROW_END, SEPARATOR = -1, -2

    def __init__(
        self, patches: Tensor, grids: list[Grid], windows: Tensor, sizes: list[int], hidden: list[int]
    ):
        super().__init__(patches, grids, windows, sizes)
        self.hidden = hidden

    @property
    def lengths(self) -> list[int]:
        return [n + hidden for n, hidden in zip(super().lengths, self.hidden, strict=True)]


class QueriedPictures(Pictures):
    """Images, of one or more pictures, with a number of tokens of their own each."""

    def __init__(self, patches: Tensor, grids: list[Grid], sizes: list[int]):
        super().__init__(patches, grids, len(sizes))
        self.sizes = sizes

    def counts(self, merge: int) -> list[int]:
        return self.sizes


class PooledPictures(Pictures):
    """Images and videos whose patches are pooled before the projector, each by a number n of its own
    (VideoLLaMA 3, arXiv:2501.13106, section 3): a block of n times n adjacent patches becomes the bilinear
    interpolation at its centre, that is the mean of its patches for n = 2, of its one or four central patches
    for larger n.

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


def blank_picture(spec: VisionSpec, merge: int, like: Tensor) -> Pictures:
    """The smallest valid picture, of zeros, with the dtype and device of a tensor."""
    side = merge
    if isinstance(spec.pictures, SquarePictures | AnyresPictures):
        side = spec.pictures.size // spec.patches.size
    if isinstance(spec.pictures, WindowedPictures):
        side = spec.pictures.side
    patches = like.new_zeros(side**2, spec.patches.width)
    if isinstance(spec.pictures, AnyresPictures):
        tokens = spec.pictures.token_side or side
        return TiledPictures(patches, side, [of_whole(tokens)], [1], images=1, token_side=tokens)
    if isinstance(spec.pictures, MaskedPictures):
        return QueriedPictures(patches, [(1, side, side)], [1])
    if spec.query_encoder is not None:
        return QueriedPictures(patches, [(1, side, side)], [1 + spec.query_encoder.tokens_of(side**2)[1]])
    if isinstance(spec.pictures, PartlyHiddenTiles):
        windows = torch.tensor([[0] * 4, [TilesOfPictures.ROW_END] * 4, [TilesOfPictures.SEPARATOR] * 4])
        return TilesOfPictures(patches, [(1, side, side)], windows, [3], [0])
    if isinstance(spec.pictures, WindowedPictures):
        return PicturesInWindows(patches, [(1, side, side)], torch.zeros(1, 1, dtype=torch.long), [1])
    return Pictures(
        patches, [(1, side, side)], images=1, extra=int(spec.class_feature), rows_end=spec.rows_end
    )


def replaced(embeds: Tensor, features: Tensor, seen: Tensor, number: Tensor, added: bool = False) -> Tensor:
    """Replace embeddings [T, H] by features [F, H]: those of the tokens in the mask `seen` [T, 1], by the
    feature with the index `number` [T]. If `added` the features are added to the embeddings.
    """
    placed = features.to(embeds.dtype)[number]
    return torch.where(seen, embeds + placed if added else placed, embeds)
