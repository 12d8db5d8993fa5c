"""Random outputs of processors for the pictures of conversations in scenes.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.images.pieces import (
    Document,
    Image,
    Piece,
    Video,
    crops_of,
    kept_of,
    slices_of,
    tiles_of,
    windows_of,
)
from liger_models.layers.specs import (
    AnyresPictures,
    CroppedPictures,
    FlatGrids,
    GridPictures,
    MaskedPictures,
    PaddedPictures,
    PartlyHiddenTiles,
    PlacedPictures,
    PooledGrids,
    ShapedPictures,
    SquarePictures,
    StripPictures,
    WindowedPictures,
)

LEAST_SIDE, LEAST_PATCHES = 18, 96  # smaller images are padded to this, so that calls can be joined


class Outputs:
    """Base class of `Scenes`: the outputs for pictures."""

    vision: Any
    config: Mapping[str, Any]
    generator: torch.Generator | None

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _tiles(self, documents: Sequence[Document], ids: Tensor) -> dict[str, Tensor]:
        """Rows padded with empty images; each image is visible up to the next."""
        images = [[piece for piece in document if not isinstance(piece, int)] for document in documents]
        rows, most = len(images), max(map(len, images))
        if not most:
            return {}
        spec, shapes = self.vision, self.config["vision_config"]["supported_aspect_ratios"]
        ratios, filled = torch.zeros(rows, most).long(), torch.zeros(rows, most, spec.tiles).long()
        seen = torch.zeros(*ids.shape, most, spec.tiles).long()
        size = spec.image_size
        pixels = 0.1 * self._normal(rows, most, spec.tiles, spec.patches.channels, size, size)
        filled[..., 0] = 1
        for row, own in enumerate(images):
            starts = (ids[row] == spec.image_id).nonzero()[:, 0].tolist()
            for i, (image, start) in enumerate(zip(own, starts, strict=True)):
                ratios[row, i] = 1 + (image.height + image.width) // 2 % len(shapes)
                count = math.prod(shapes[ratios[row, i] - 1])
                filled[row, i, :count] = 1
                seen[row, start : (*starts, ids.shape[1])[i + 1], i, :count] = 1
        return {
            "pixel_values": pixels,
            "aspect_ratio_ids": ratios,
            "aspect_ratio_mask": filled,
            "cross_attention_mask": seen,
        }

    def _grids(self, pieces: list[Piece]) -> dict[str, Any]:
        call: dict[str, Any] = {}
        for kind, pixels, grids in (
            (Image, "pixel_values", "image_grid_thw"),
            (Video, "pixel_values_videos", "video_grid_thw"),
        ):
            own = [self._grid(piece) for piece in pieces if isinstance(piece, kind)]
            if own:
                call[grids] = torch.tensor(own)
                patches = int(call[grids].prod(1).sum())
                # Small relative to the norms' eps, so that eps matters.
                call[pixels] = 0.1 * self._normal(patches, *self._patch())
        videos = [piece.seconds for piece in pieces if isinstance(piece, Video)]
        timed = self.vision.positions is not None and self.vision.positions.tokens_per_second
        return call | ({self.vision.positions.seconds: torch.tensor(videos)} if videos and timed else {})

    def _flat_grids(self, pieces: list[Piece]) -> dict[str, Any]:
        grids = torch.tensor([self._grid(piece)[1:] for piece in pieces])
        patches = int(grids.prod(1).sum())
        return {
            "pixel_values": 0.1 * self._normal(patches, self.vision.patches.width),
            "image_grid_hw": grids,
        }

    def _strips(self, pieces: list[Piece]) -> dict[str, Any]:
        call: dict[str, Any] = {}
        for kind, pixels, sizes in (
            (Image, "pixel_values", "target_sizes"),
            (Video, "pixel_values_videos", "target_sizes_videos"),
        ):
            own = [
                grid[1:]
                for piece in pieces
                if isinstance(piece, kind)
                for _ in range(getattr(piece, "steps", 1))
                for grid in self._with_slices(piece)
            ]
            if own:
                call[sizes] = torch.tensor(own)
                size, patches = self.vision.patches.size, int(call[sizes].prod(1).sum())
                call[pixels] = 0.1 * self._normal(1, self.vision.patches.channels, size, patches * size)
        return call

    def _pooled_grids(self, pieces: list[Piece]) -> dict[str, Any]:
        """Videos are pooled by 2, and some of their tokens left out; images have all."""
        call = self._grids(pieces)
        for name, side in (("image", 1), ("video", 2)):
            if f"{name}_grid_thw" in call:
                call[f"{name}_merge_sizes"] = torch.full((len(call[f"{name}_grid_thw"]),), side)
        videos = [kept_of(piece) for piece in pieces if isinstance(piece, Video)]
        return call | ({"video_compression_mask": torch.cat(videos)} if videos else {})

    def _padded(self, pieces: list[Piece]) -> dict[str, Any]:
        """With unused pixels below each image, all on a canvas of one size."""
        size, grids = self.vision.patches.size, torch.tensor([self._grid(image)[1:] for image in pieces])
        sizes = grids * size + torch.tensor([1, 0])
        canvas = (max(LEAST_SIDE, int(side) + 1) * size for side in grids.amax(0))
        pixels = 0.1 * self._normal(len(pieces), self.vision.patches.channels, *canvas)
        return {"pixel_values": pixels, "image_sizes": sizes}

    def _placed(self, pieces: list[Piece]) -> dict[str, Any]:
        """All padded to the same number of patches, with contents that must not be read."""
        call: dict[str, Any] = {}
        most = max(LEAST_PATCHES, *(h * w for _, h, w in map(self._grid, pieces)))
        for kind, pixels, ids in (
            (Image, "pixel_values", "image_position_ids"),
            (Video, "pixel_values_videos", "video_position_ids"),
        ):
            own = [self._grid(piece) for piece in pieces if isinstance(piece, kind)]
            if not own:
                continue
            pictures = [(h, w) for t, h, w in own for _ in range(t)]
            call[pixels] = 0.5 + 0.1 * self._normal(len(pictures), most, self.vision.patches.width)
            call[ids] = torch.full((len(pictures), most, 2), -1)
            for places, (h, w) in zip(call[ids], pictures, strict=True):
                row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
                places[: h * w] = torch.stack([column.flatten(), row.flatten()], 1)
            if kind is Video:
                call["num_frames_per_video"] = torch.tensor([t for t, _, _ in own])
        return call

    def _shaped(self, pieces: list[Piece]) -> dict[str, Any]:
        """All padded to the same number of patches, with contents that must not be read."""
        shapes = torch.tensor([self._grid(piece)[1:] for piece in pieces])
        most = max(LEAST_PATCHES, int(shapes.prod(1).max()))
        return {
            "pixel_values": 0.1 * self._normal(len(pieces), most, self.vision.patches.width),
            "spatial_shapes": shapes,
            "pixel_attention_mask": (torch.arange(most) < shapes.prod(1)[:, None]).int(),
        }

    def _squares(self, pieces: list[Piece]) -> dict[str, Any]:
        size = self.vision.pictures.size
        return {"pixel_values": 0.1 * self._normal(len(pieces), self.vision.patches.channels, size, size)}

    def _cropped(self, pieces: list[Piece]) -> dict[str, Any]:
        """Whole images, and crops of some."""
        counts, side = [crops_of(piece) for piece in pieces], self._crop() * self.vision.patches.size
        crops = 0.1 * self._normal(sum(counts), self.vision.patches.channels, side, side)
        call = {**self._squares(pieces), "num_local_patches": torch.tensor(counts)}
        return call | ({"pixel_values_local": crops} if sum(counts) else {})

    def _masked(self, pieces: list[Piece]) -> dict[str, Any]:
        """All in the largest square, with contents below and to the right of them that must not be read."""
        side, size = math.isqrt(max(self.vision.pictures.tokens)[0]), self.vision.patches.size
        place = torch.arange(side * size)
        sides = (min(side, piece.height) for piece in pieces), (min(side, piece.width) for piece in pieces)
        rows, columns = (place < size * torch.tensor(list(own))[:, None] for own in sides)
        pixels = 0.1 * self._normal(len(pieces), self.vision.patches.channels, side * size, side * size)
        return {"pixel_values": pixels, "pixel_mask": (rows[:, :, None] & columns[:, None]).long()}

    def _hidden_tiles(self, pieces: list[Piece]) -> dict[str, Any]:
        """Images in the fewest tiles, with contents of padding and of further tiles that must not be read."""
        size, side = self.vision.pictures.size, self.vision.pictures.size // self.vision.patches.size
        sizes = [tiles_of(piece, side) for piece in pieces]
        most = max(9, *(rows * columns for rows, columns, _, _ in sizes))
        mask = torch.ones(len(pieces), 1 + most, side, side, dtype=torch.long)
        for own, (rows, columns, h, w) in zip(mask, sizes, strict=True):
            grid = torch.zeros(rows * side, columns * side, dtype=torch.long)
            grid[:h, :w] = 1
            tiles = grid.unflatten(1, (columns, side)).unflatten(0, (rows, side)).transpose(1, 2)
            own[1 : 1 + rows * columns] = tiles.flatten(0, 1)
        shape = len(pieces), 1 + most, self.vision.patches.channels, size, size
        return {
            "image_pixel_values": 0.1 * self._normal(*shape),
            "image_sizes": torch.tensor([[rows * size, columns * size] for rows, columns, _, _ in sizes]),
            "image_attention_mask": mask,
        }

    def _windowed(self, pieces: list[Piece]) -> dict[str, Any]:
        side = self.vision.pictures.side
        counts, windows, grids = [2 + crops_of(piece) for piece in pieces], [], []
        for piece, before in zip(pieces, itertools.accumulate(counts, initial=0), strict=False):
            whole, crops = windows_of(piece, self.vision.pictures.side)
            own = torch.cat([whole, crops])
            windows.append(own.where(own < 0, own + before * side**2))
            grids.append([1, len(whole), 1, len(crops)])
        return {
            "pixel_values": 0.1 * self._normal(sum(counts), side**2, self.vision.patches.width),
            "image_token_pooling": torch.cat(windows),
            "image_grids": torch.tensor(grids),
            "image_num_crops": torch.tensor(counts),
        }

    def _anyres(self, pieces: list[Piece]) -> dict[str, Any]:
        """Images with spare tiles."""
        size, call = self.vision.pictures.size, {}
        shape = self.vision.patches.channels, size, size
        images = [piece for piece in pieces if isinstance(piece, Image)]
        videos = [piece for piece in pieces if isinstance(piece, Video)]
        if images:
            call["pixel_values"] = 0.1 * self._normal(len(images), 9, *shape)
            call["image_sizes"] = torch.tensor([[image.height * 3, image.width * 3] for image in images])
        if videos:
            call["pixel_values_videos"] = 0.1 * self._normal(len(videos), videos[0].steps, *shape)
        return call

    def _with_slices(self, piece: Image | Video) -> list[tuple[int, int, int]]:
        """The grids of an image, or a frame, and of its slices."""
        slices = [(1, *size) for row in slices_of(piece, self.vision.merge) for size in row]
        return [(1, *self._grid(piece)[1:]), *slices]

    def _patch(self) -> tuple[int, ...]:
        spec = self.vision.patches
        whole = (
            getattr(self.vision.pictures, "raster", False) and spec.frames == 1 and not self.vision.rows_end
        )
        return (spec.channels, spec.size, spec.size) if whole else (spec.width,)

    def _crop(self) -> int:
        """Side of a crop, in patches: three quarters of the image's, in whole tokens."""
        merge = self.vision.merge
        side = self.vision.pictures.size // self.vision.patches.size
        return max(merge, side * 3 // 4 // merge * merge)

    def _grid(self, piece: Image | Video) -> tuple[int, int, int]:
        """Padded images have an extra row and column without tokens; square ones have a fixed size. Where
        more patches make a token than in most families, sides are rounded up.
        """
        if isinstance(self.vision.pictures, SquarePictures | CroppedPictures):
            return 1, *[self.vision.pictures.size // self.vision.patches.size] * 2
        more, block = int(isinstance(self.vision.pictures, PaddedPictures)), 1
        if isinstance(self.vision.pictures, StripPictures):
            block = self.vision.merge
        steps = getattr(piece, "steps", 1)
        steps += steps % 2 if self.vision.paired and isinstance(piece, Video) else 0
        height, width = (-(-size // block) * block + more for size in (piece.height, piece.width))
        return steps, height, width


OUTPUTS: dict[type, Callable[[Outputs, list[Piece]], dict[str, Any]]] = {
    GridPictures: Outputs._grids,
    FlatGrids: Outputs._flat_grids,
    PooledGrids: Outputs._pooled_grids,
    StripPictures: Outputs._strips,
    PaddedPictures: Outputs._padded,
    SquarePictures: Outputs._squares,
    CroppedPictures: Outputs._cropped,
    WindowedPictures: Outputs._windowed,
    MaskedPictures: Outputs._masked,
    PartlyHiddenTiles: Outputs._hidden_tiles,
    PlacedPictures: Outputs._placed,
    ShapedPictures: Outputs._shaped,
    AnyresPictures: Outputs._anyres,
}
"""Builders of a processor's output, by kind of spec."""
