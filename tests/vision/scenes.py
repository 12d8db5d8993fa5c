"""Conversations with images and videos, for families that see: what their processors would give of them.

A document is a list of pieces: a number stands for so many tokens of text, anything else for a picture.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pairs
import torch
from torch import Tensor

from liger_models.layers.spec import (
    AnyresPictures,
    GridPictures,
    PaddedPictures,
    PlacedPictures,
    SquarePictures,
    TiledVisionSpec,
)
from liger_models.layers.vision import anyres

Piece = Any
Document = Sequence[Piece]


@dataclass(frozen=True)
class Image:
    """Of so many patches in height and width."""

    height: int
    width: int


@dataclass(frozen=True)
class Video:
    """Of so many steps of time."""

    steps: int
    height: int
    width: int
    seconds: float = 1.0


DOCUMENTS: dict[str, Document] = {
    "two images": [2, Image(6, 10), 1, Image(4, 4), 3],
    "a video and an image": [3, Video(3, 4, 6, 1.7), 2, Image(14, 2), 1],
    "none": [21],
    "an image first": [Image(2, 4), 5],
}
TWO: list[Document] = [
    [1, Image(6, 10), 2, Video(3, 4, 2, 1.7), 3],
    [Image(4, 4), 9, Image(16, 6), 7],
]


class SeeingPair(pairs.Pair):
    """A native model that sees beside its reference."""

    def batch(self, rows: int = 2, length: int = 19) -> dict[str, Tensor]:
        """What is judged by, where nothing else is asked for: rows that need no padding."""
        lengths = [len(self._tokens(document)) for document in TWO]
        return self.scene(*([*d, max(lengths) - n] for d, n in zip(TWO, lengths, strict=True)))

    def scene(self, *documents: Document, padding: str = "right") -> dict[str, Any]:
        """A call of a batch whose rows are these documents, with images for videos where none are known."""
        documents = tuple([self._shown(piece) for piece in document] for document in documents)
        made = [self._tokens(document) for document in documents]
        longest = max(map(len, made))
        ids = torch.full((len(made), longest), 9)
        mask = torch.zeros_like(ids)
        for row, (tokens, own) in enumerate(zip(made, mask, strict=True)):
            place = slice(None, len(tokens)) if padding == "right" else slice(longest - len(tokens), None)
            ids[row, place], own[place] = torch.tensor(tokens), 1
        call: dict[str, Any] = {"input_ids": ids}
        if isinstance(self.vision, TiledVisionSpec):
            call |= self._tiles(documents, ids)
        else:
            call |= {**self._pictures(documents), **self._kinds(ids, mask)}
        begins = mask.cumsum(1) <= 1  # nothing precedes the first token, though the reference sees padding
        call["labels"] = ids.masked_fill(begins | (mask == 0) | (self._kind(ids) != 0), -100)
        return call | ({} if bool(mask.all()) else {"attention_mask": mask})

    @property
    def vision(self) -> Any:
        return self.ours.spec.vision

    def _shown(self, piece: Piece) -> Piece:
        if isinstance(piece, Video) and getattr(self.vision, "video_id", None) is None:
            return Image(piece.height, piece.width)
        return piece

    def _tokens(self, document: Document) -> list[int]:
        tokens: list[int] = []
        for piece in document:
            if isinstance(piece, int):
                tokens += torch.randint(10, self.vocab_size, (piece,)).tolist()
            elif isinstance(self.vision, TiledVisionSpec):
                tokens.append(self.vision.image_id)
            else:
                piece = self._shown(piece)
                if isinstance(self.vision.pictures, AnyresPictures):
                    tokens += self._of_tiles(piece, sum(isinstance(other, Image) for other in document))
                    continue
                grid, merge = self._grid(piece), self.vision.projector.merge
                one = self.vision.video_id if isinstance(piece, Video) else self.vision.image_id
                step = [one] * (grid[1] // merge * (grid[2] // merge))
                between = [11] if self.vision.positions and self.vision.positions.steps_apart else []
                tokens += [*step, *[*between, *step] * (grid[0] - 1)]
        return tokens

    def _kind(self, ids: Tensor) -> Tensor:
        video_id = getattr(self.vision, "video_id", None)
        return (ids == self.vision.image_id).int() + 2 * (ids == (-1 if video_id is None else video_id)).int()

    def _kinds(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        if self.vision.kinds is None:
            return {}
        kinds = self._kind(ids)
        if self.vision.spans == "prefix":  # which ends behind the token that follows the last image
            place = mask.cumsum(1)
            kinds = (place > (place * kinds).amax(1, keepdim=True) + 1).int()
        return {self.vision.kinds: kinds}

    def _pictures(self, documents: Sequence[Document]) -> dict[str, Any]:
        pieces = [piece for document in documents for piece in document if not isinstance(piece, int)]
        if not pieces:
            return {}
        call = KINDS[type(self.vision.pictures)](self, pieces)
        if isinstance(self.vision.pictures, AnyresPictures):
            counts = [sum(isinstance(piece, Image) for piece in document) for document in documents]
            call["batch_num_images"] = torch.tensor(counts)
        return call

    def _tiles(self, documents: Sequence[Document], ids: Tensor) -> dict[str, Tensor]:
        """Rows filled up with images that are not there; each image is seen up to the next."""
        images = [[piece for piece in document if not isinstance(piece, int)] for document in documents]
        rows, most = len(images), max(map(len, images))
        if not most:
            return {}
        spec, shapes = self.vision, self.config["vision_config"]["supported_aspect_ratios"]
        ratios, filled = torch.zeros(rows, most).long(), torch.zeros(rows, most, spec.tiles).long()
        seen = torch.zeros(*ids.shape, most, spec.tiles).long()
        size = spec.image_size
        pixels = 0.1 * torch.randn(rows, most, spec.tiles, spec.patches.channels, size, size)
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

    def pack(self, calls: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Calls of one row each as one of all documents in one row."""
        tiled = isinstance(self.vision, TiledVisionSpec)
        packed = {
            name: torch.cat(
                [call[name] for call in calls if name in call], 1 if tiled or name in OF_TOKENS else 0
            )
            for name in {name for call in calls for name in call} - {"cross_attention_mask"}
        }
        if tiled:
            seen = [
                call.get("cross_attention_mask", torch.zeros(*call["input_ids"].shape, 0, self.vision.tiles))
                for call in calls
            ]
            blocks = [torch.block_diag(*(x[0, :, :, i] for x in seen)) for i in range(self.vision.tiles)]
            packed["cross_attention_mask"] = torch.stack(blocks, -1)[None].long()
        return packed

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
                # Small beside the eps of the norms, so that these matter.
                call[pixels] = 0.1 * torch.randn(patches, self.vision.patches.width)
        videos = [piece.seconds for piece in pieces if isinstance(piece, Video)]
        timed = self.vision.positions is not None and self.vision.positions.tokens_per_second
        return call | ({"second_per_grid_ts": torch.tensor(videos)} if videos and timed else {})

    def _padded(self, pieces: list[Piece]) -> dict[str, Any]:
        """With pixels below each image that make no patch, all on a canvas of one size."""
        size = self.vision.patches.size
        sizes = torch.tensor([self._grid(image)[1:] for image in pieces]) * size + torch.tensor([1, 0])
        pixels = 0.1 * torch.randn(len(pieces), self.vision.patches.channels, 18 * size, 18 * size)
        return {"pixel_values": pixels, "image_sizes": sizes}

    def _placed(self, pieces: list[Piece]) -> dict[str, Any]:
        """All filled up to one number of patches, with what is not to be read."""
        call: dict[str, Any] = {}
        for kind, pixels, ids in (
            (Image, "pixel_values", "image_position_ids"),
            (Video, "pixel_values_videos", "video_position_ids"),
        ):
            own = [self._grid(piece) for piece in pieces if isinstance(piece, kind)]
            if not own:
                continue
            pictures = [(h, w) for t, h, w in own for _ in range(t)]
            call[pixels] = 0.5 + 0.1 * torch.randn(len(pictures), 96, self.vision.patches.width)
            call[ids] = torch.full((len(pictures), 96, 2), -1)
            for places, (h, w) in zip(call[ids], pictures, strict=True):
                row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
                places[: h * w] = torch.stack([column.flatten(), row.flatten()], 1)
            if kind is Video:
                call["num_frames_per_video"] = torch.tensor([t for t, _, _ in own])
        return call

    def _squares(self, pieces: list[Piece]) -> dict[str, Any]:
        size = self.vision.pictures.size
        return {"pixel_values": 0.1 * torch.randn(len(pieces), self.vision.patches.channels, size, size)}

    def _anyres(self, pieces: list[Piece]) -> dict[str, Any]:
        """Images with as many tiles as any can have."""
        size, call = self.vision.pictures.size, {}
        shape = self.vision.patches.channels, size, size
        images = [piece for piece in pieces if isinstance(piece, Image)]
        videos = [piece for piece in pieces if isinstance(piece, Video)]
        if images:
            call["pixel_values"] = 0.1 * torch.randn(len(images), 9, *shape)
            call["image_sizes"] = torch.tensor([[image.height * 3, image.width * 3] for image in images])
        if videos:
            call["pixel_values_videos"] = 0.1 * torch.randn(len(videos), videos[0].steps, *shape)
        return call

    def _of_tiles(self, piece: Image | Video, images: int) -> list[int]:
        pictures, side = self.vision.pictures, self.vision.pictures.size // self.vision.patches.size
        if isinstance(piece, Video):
            return [self.vision.video_id] * len(anyres.of_video(side, piece.steps).features)
        taps = anyres.of_whole(side)
        if images == 1:
            pixels = piece.height * 3, piece.width * 3
            height, width = anyres.best_resolution(*pixels, pictures.resolutions)
            tiles = height // pictures.size, width // pictures.size
            taps = anyres.of_tiles(side, *tiles, *pixels, pictures.most)
        return [self.vision.image_id] * len(taps.features)

    def _grid(self, piece: Image | Video) -> tuple[int, int, int]:
        """Padded images have a row and a column more, of which no token may come; square ones one size."""
        if isinstance(self.vision.pictures, SquarePictures):
            return 1, *[self.vision.pictures.size // self.vision.patches.size] * 2
        more = int(isinstance(self.vision.pictures, PaddedPictures))
        return getattr(piece, "steps", 1), piece.height + more, piece.width + more


OF_TOKENS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")
KINDS = {
    GridPictures: SeeingPair._grids,
    PaddedPictures: SeeingPair._padded,
    SquarePictures: SeeingPair._squares,
    PlacedPictures: SeeingPair._placed,
    AnyresPictures: SeeingPair._anyres,
}
"""What a processor gives, by what the spec says of it."""


def make_pair(family: str, changes: Mapping[str, Any] | None = None, **options: Any) -> SeeingPair:
    """`changes` of keys, or of keys within "text_config" and "vision_config"."""
    changes = copy.deepcopy(dict(changes or {}))
    tiny = pairs.find_architecture(family).tiny
    for part in ("text_config", "vision_config"):
        if part in changes:
            changes[part] = pairs.changed(tiny[part], changes[part])
    made = pairs.make_pair(family, changes, kind=SeeingPair, **options)
    assert isinstance(made, SeeingPair)
    return made
