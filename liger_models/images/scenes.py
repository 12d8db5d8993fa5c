"""Synthetic conversations with random images, videos and sounds, in the form of processor outputs, for tests
and benchmarks.

    scenes = Scenes(model.spec, config)
    call = scenes.make([[5, Image(8, 12), 20], [40]])   # 5 tokens of text, an image, 20 more; text only
    model(**call).loss

A document is a list of pieces: a number is that many text tokens, anything else a picture with its size in
patches, a multiple of the projector's merge size, or a sound. Families with a fixed image size use that.
"""

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
    windows_of,
)
from liger_models.images.sounds import WORD, Sound, framed_sound, heard
from liger_models.layers.specs import (
    AnyresPictures,
    ClockSpec,
    CroppedPictures,
    FlatGrids,
    GridPictures,
    MaskedPictures,
    ModelSpec,
    PaddedPictures,
    PlacedPictures,
    PooledGrids,
    ShapedPictures,
    SquarePictures,
    StripPictures,
    TiledVisionSpec,
    WindowedPictures,
)
from liger_models.layers.vision import anyres
from liger_models.layers.vision.vision import FRAMED

FIRST_OF_TEXT = 10  # ids below may be special
PADDING, BETWEEN_STEPS = 9, 11
LEAST_SIDE, LEAST_PATCHES = 18, 96  # smaller images are padded to this, so that calls can be joined


class Scenes:
    """Makes inputs for a multimodal model.

    Args:
        spec: the model's.
        config: its config.json.
        generator: CPU generator of the random numbers; None: torch's default.
    """

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any], generator: torch.Generator | None = None):
        self.vision: Any = spec.vision
        self.position_limit = spec.position_limit
        self.audio, self.clocked = spec.audio, isinstance(getattr(spec.vision, "positions", None), ClockSpec)
        self.vocab_size, self.config, self.generator = spec.vocab_size, config, generator

    def make(self, documents: Sequence[Document], padding: str = "right") -> dict[str, Any]:
        """Inputs for a batch with these documents as rows, with images in place of unsupported videos.

        Labels are the text tokens. Shorter rows are padded on the "right" or on the "left".
        """
        documents = [[self.shown(piece) for piece in document] for document in documents]
        made = [self.tokens(document) for document in documents]
        longest = max(map(len, made))
        ids = torch.full((len(made), longest), PADDING)
        mask = torch.zeros_like(ids)
        for row, (tokens, own) in enumerate(zip(made, mask, strict=True)):
            place = slice(None, len(tokens)) if padding == "right" else slice(longest - len(tokens), None)
            ids[row, place], own[place] = torch.tensor(tokens), 1
        call: dict[str, Any] = {"input_ids": ids}
        if isinstance(self.vision, TiledVisionSpec):
            call |= self._tiles(documents, ids)
        elif self.vision is not None:
            call |= {**self._pictures(documents), **self._kinds_keyword(ids, mask)}
        call |= heard(self.audio, [p for d in documents for p in d if isinstance(p, Sound)], self._normal)
        begins = (
            mask.cumsum(1) <= 1
        )  # nothing precedes the first token, although a reference attends to padding
        call["labels"] = ids.masked_fill(begins | (mask == 0) | (self.kinds(ids) != 0), -100)
        return call | ({} if bool(mask.all()) and not self.clocked else {"attention_mask": mask})

    def make_even(self, documents: Sequence[Document]) -> dict[str, Any]:
        """The same without padding: rows are filled with text."""
        lengths = [len(self.tokens(document)) for document in documents]
        return self.make([[*d, max(lengths) - n] for d, n in zip(documents, lengths, strict=True)])

    def shown(self, piece: Piece) -> Piece:
        """Replace a video by an image if videos are not supported."""
        if isinstance(piece, Video) and getattr(self.vision, "video_id", None) is None:
            return Image(piece.height, piece.width)
        return piece

    def tokens(self, document: Document) -> list[int]:
        """Token ids of a document."""
        tokens: list[int] = []
        for piece in document:
            if isinstance(piece, int):
                tokens += self._words(piece)
            elif isinstance(piece, Sound):
                tokens += framed_sound(self.audio, piece, self.config)
            elif isinstance(self.vision, TiledVisionSpec):
                tokens.append(self.vision.image_id)
            else:
                piece = self.shown(piece)
                if isinstance(self.vision.pictures, AnyresPictures):
                    tokens += self._of_tiles(piece, sum(isinstance(other, Image) for other in document))
                    continue
                if isinstance(self.vision.pictures, WindowedPictures):
                    for windows in windows_of(piece, self.vision.pictures.side):
                        tokens += [self.vocab_size] + [self.vision.image_id] * len(windows)
                    continue
                if isinstance(self.vision.pictures, MaskedPictures):
                    tokens += [self.vision.image_id] * max(self.vision.pictures.tokens)[1]
                    continue
                grid, merge = self._grid(piece), self.vision.merge
                if isinstance(self.vision.pictures, CroppedPictures):
                    for _ in range(crops_of(piece)):
                        tokens += [self.vision.image_id] * (self._crop() // merge) ** 2 + [BETWEEN_STEPS]
                if isinstance(self.vision.pictures, StripPictures):
                    tokens += self._sliced(piece)
                    continue
                if isinstance(self.vision.pictures, PooledGrids):
                    of_image = isinstance(piece, Image)
                    count = grid[1] * grid[2] if of_image else int(kept_of(piece).sum())
                    tokens += [self.vision.image_id if of_image else self.vision.video_id] * count
                    continue
                one = self.vision.video_id if isinstance(piece, Video) else self.vision.image_id
                rows, more = int(self.vision.rows_end), int(self.vision.class_feature)
                step = [one] * (grid[1] // merge * (grid[2] // merge + rows) + 2 * rows + more)
                between = self.vision.positions and self.vision.positions.steps_apart
                more = 0 if self.vision.clips else grid[0] // (2 if self.vision.paired else 1) - 1
                before, after = self._frame(piece)
                tokens += [*before, *step, *[*([BETWEEN_STEPS] if between else []), *step] * more, *after]
        return tokens

    def _sliced(self, piece: Image | Video) -> list[int]:
        """The tokens of an image, or of each frame of a video, and its slices."""
        one, merge = (
            self.vision.video_id if isinstance(piece, Video) else self.vision.image_id,
            self.vision.merge,
        )
        tokens: list[int] = []
        for _ in range(getattr(piece, "steps", 1)):
            for _, h, w in self._with_slices(piece):
                tokens += [WORD, *[one] * (h * w // merge**2), WORD]
        return tokens

    def _with_slices(self, piece: Image | Video) -> list[tuple[int, int, int]]:
        """The grids of an image, or a frame, and of its slices."""
        slices = [(1, *size) for row in slices_of(piece, self.vision.merge) for size in row]
        return [(1, *self._grid(piece)[1:]), *slices]

    def _frame(self, piece: Image | Video) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens before and after a picture."""
        if self.vision.framing_ids is not None:
            first, last = self.vision.framing_ids[2 * isinstance(piece, Video) :][:2]
            return [first], [last]
        if self.clocked:
            return [self.config["vision_start_token_id"]], [WORD]
        before = len(self.vision.marker_ids) // 2
        return self.vision.marker_ids[:before], self.vision.marker_ids[before:]

    def kinds(self, ids: Tensor) -> Tensor:
        """Type of each token: 0 for text, 1 for images, 2 for videos, 3 for sounds."""
        if getattr(self.vision, "spans", None) == "marked":  # ids after the vocabulary frame images
            return (ids >= self.vocab_size).int()
        own = [getattr(self.vision, f"{kind}_id", None) for kind in ("image", "video")]
        own.append(None if self.audio is None else self.audio.audio_id)
        found = torch.zeros_like(ids, dtype=torch.int32)
        for number, token in enumerate(own, 1):
            found += number * (ids == (-1 if token is None else token))
        return found

    def _words(self, count: int) -> list[int]:
        """Random ids that are not image placeholders."""
        ids = torch.randint(FIRST_OF_TEXT, self.vocab_size, (count,), generator=self.generator)
        return ids.where(self.kinds(ids) == 0, WORD).tolist()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _kinds_keyword(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        if self.vision.kinds is None:
            return {}
        kinds = self.kinds(ids)
        if self.vision.spans == "prefix":  # the prefix includes the token after the last image
            place = mask.cumsum(1)
            kinds = (place > (place * kinds).amax(1, keepdim=True) + 1).int()
        call = {self.vision.kinds: kinds}
        if self.vision.framing_ids is not None:
            framed = kinds.clone()
            for number, framing in enumerate(self.vision.framing_ids):
                framed[ids == framing] = 1 + number // 2
            call[FRAMED] = framed
        return call

    def _pictures(self, documents: Sequence[Document]) -> dict[str, Any]:
        pieces = [p for document in documents for p in document if isinstance(p, Image | Video)]
        if not pieces:
            return {}
        call = _KINDS[type(self.vision.pictures)](self, pieces)
        if getattr(self.vision.pictures, "by_row", False):
            return self._by_row(call["pixel_values"], call.get("pixel_mask", torch.ones(1)), documents)
        if isinstance(self.vision.pictures, AnyresPictures) and self.vision.pictures.most is not None:
            counts = [sum(isinstance(piece, Image) for piece in document) for document in documents]
            call["batch_num_images"] = torch.tensor(counts)
        return call

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

    def _patch(self) -> tuple[int, ...]:
        spec = self.vision.patches
        whole = (
            getattr(self.vision.pictures, "raster", False) and spec.frames == 1 and not self.vision.rows_end
        )
        return (spec.channels, spec.size, spec.size) if whole else (spec.width,)

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
        """All in the largest square, with contents below and beside them that must not be read."""
        side, size = math.isqrt(max(self.vision.pictures.tokens)[0]), self.vision.patches.size
        place = torch.arange(side * size)
        sides = (min(side, piece.height) for piece in pieces), (min(side, piece.width) for piece in pieces)
        rows, columns = (place < size * torch.tensor(list(own))[:, None] for own in sides)
        pixels = 0.1 * self._normal(len(pieces), self.vision.patches.channels, side * size, side * size)
        return {"pixel_values": pixels, "pixel_mask": (rows[:, :, None] & columns[:, None]).long()}

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

    def _crop(self) -> int:
        """Side of a crop, in patches: three quarters of the image's, in whole tokens."""
        merge = self.vision.merge
        side = self.vision.pictures.size // self.vision.patches.size
        return max(merge, side * 3 // 4 // merge * merge)

    def _by_row(self, images: Tensor, masks: Tensor, documents: Sequence[Document]) -> dict[str, Any]:
        """The images of each row, filled up with images of zeros."""
        counts = [sum(not isinstance(piece, int) for piece in document) for document in documents]
        values = images.new_zeros(len(counts), max(counts), *images.shape[1:])
        there = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        values[there] = images
        mask = torch.zeros_like(values[:, :, 0]).index_put((there,), masks.to(values.dtype))
        return {"pixel_values": values, "pixel_attention_mask": mask.long()}

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

    def _of_tiles(self, piece: Image | Video, images: int) -> list[int]:
        pictures, side = self.vision.pictures, self.vision.pictures.size // self.vision.patches.size
        if isinstance(piece, Video):
            return [self.vision.video_id] * len(
                anyres.of_video(side, piece.steps, pictures.frame_pool).features
            )
        taps = anyres.of_whole(side)
        if images == 1 or pictures.most is None:
            pixels = piece.height * 3, piece.width * 3
            height, width = anyres.best_resolution(*pixels, pictures.resolutions)
            tiles = height // pictures.size, width // pictures.size
            taps = anyres.of_tiles(side, *tiles, *pixels, pictures.most)
        return [self.vision.image_id] * len(taps.features)

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


_KINDS: dict[type, Callable[[Scenes, list[Piece]], dict[str, Any]]] = {
    GridPictures: Scenes._grids,
    FlatGrids: Scenes._flat_grids,
    PooledGrids: Scenes._pooled_grids,
    StripPictures: Scenes._strips,
    PaddedPictures: Scenes._padded,
    SquarePictures: Scenes._squares,
    CroppedPictures: Scenes._cropped,
    WindowedPictures: Scenes._windowed,
    MaskedPictures: Scenes._masked,
    PlacedPictures: Scenes._placed,
    ShapedPictures: Scenes._shaped,
    AnyresPictures: Scenes._anyres,
}
"""Builders of a processor's output, by kind of spec."""
