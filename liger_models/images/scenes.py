"""Synthetic conversations with random images, videos and sounds, in the form of processor outputs, for tests
and benchmarks.

    scenes = Scenes(model.spec, config)
    call = scenes.make([[5, Image(8, 12), 20], [40]])   # 5 tokens of text, an image, 20 more; text only
    model(**call).loss

A document is a list of pieces: a number is that many text tokens, anything else a picture with its size in
patches, a multiple of the projector's merge size, or a sound. Families with a fixed image size use that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.images.outputs import OUTPUTS, Outputs
from liger_models.images.pieces import (
    Document,
    Image,
    Piece,
    Video,
    crops_of,
    kept_of,
    slices_of,
    tokens_of_tiles,
    windows_of,
)
from liger_models.images.sounds import WORD, Sound, framed_sound, heard
from liger_models.layers.grids import anyres
from liger_models.layers.specs import (
    AnyresPictures,
    CanvasSpec,
    ClockSpec,
    CroppedPictures,
    MaskedPictures,
    ModelSpec,
    PartlyHiddenTiles,
    PooledGrids,
    StripPictures,
    TiledVisionSpec,
    WindowedPictures,
)
from liger_models.layers.vision.vision_inputs import FRAMED

FIRST_OF_TEXT = 10  # ids below may be special
PADDING, BETWEEN_STEPS = 9, 11


class Scenes(Outputs):
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
        text = next(i for i in range(PADDING, -1, -1) if not self.kinds(torch.tensor([i])).any())
        ids = torch.full((len(made), longest), text)
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
                if isinstance(self.vision.pictures, PartlyHiddenTiles):
                    tokens += [self.vision.image_id] * tokens_of_tiles(self.vision, piece)
                    continue
                if isinstance(self.vision.pictures, MaskedPictures):
                    tokens += [self.vision.image_id] * max(self.vision.pictures.tokens)[1]
                    continue
                grid, merge = self._grid(piece), self.vision.merge
                if self.vision.query_encoder is not None:
                    sides = [self._crop()] * crops_of(piece) + [grid[1]]
                    counts = [self.vision.query_encoder.tokens_of(side**2)[1] for side in sides]
                    tokens += [self.vision.image_id] * (sum(counts) + 1)
                    continue
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
        one = self.vision.video_id if isinstance(piece, Video) else self.vision.image_id
        canvas, merge = self.vision.positions, self.vision.merge
        of_image, of_slice, newline = (WORD, WORD), (WORD, WORD), WORD
        if isinstance(canvas, CanvasSpec):
            of_image, of_slice, newline = canvas.image_ids, canvas.slice_ids, canvas.newline_id
        _, height, width = self._grid(piece)
        tokens = [of_image[0], *[one] * (height * width // merge**2), of_image[1]]
        for number, row in enumerate(slices_of(piece, merge)):
            tokens += [newline] * (number > 0)
            for h, w in row:
                tokens += [of_slice[0], *[one] * (h * w // merge**2), of_slice[1]]
        return [*tokens * getattr(piece, "steps", 1), newline]

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
        call = OUTPUTS[type(self.vision.pictures)](self, pieces)
        if getattr(self.vision.pictures, "by_row", False):
            return self._by_row(call["pixel_values"], call.get("pixel_mask", torch.ones(1)), documents)
        if isinstance(self.vision.pictures, AnyresPictures) and self.vision.pictures.most is not None:
            counts = [sum(isinstance(piece, Image) for piece in document) for document in documents]
            call["batch_num_images"] = torch.tensor(counts)
        return call

    def _by_row(self, images: Tensor, masks: Tensor, documents: Sequence[Document]) -> dict[str, Any]:
        """The images of each row, filled up with images of zeros."""
        counts = [sum(not isinstance(piece, int) for piece in document) for document in documents]
        values = images.new_zeros(len(counts), max(counts), *images.shape[1:])
        there = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        values[there] = images
        mask = torch.zeros_like(values[:, :, 0]).index_put((there,), masks.to(values.dtype))
        return {"pixel_values": values, "pixel_attention_mask": mask.long()}

    def _of_tiles(self, piece: Image | Video, images: int) -> list[int]:
        pictures = self.vision.pictures
        side = pictures.token_side or pictures.size // self.vision.patches.size
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
