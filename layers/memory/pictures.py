"""Sizes of a batch's images, and memory kept for them outside of the encoder's layers."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import nn

from liger_models.layers.grids.anyres import best_resolution, of_tiles, of_whole
from liger_models.layers.grids.pyramid import numbers_kept
from liger_models.layers.memory.measured import Measured, measured
from liger_models.layers.parts.window_merger import WindowMerger
from liger_models.layers.specs import (
    AnyresPictures,
    CroppedPictures,
    EndedProjectorSpec,
    GridAttentionSpec,
    MaskedPictures,
    PaddedPictures,
    PartlyHiddenTiles,
    PooledGrids,
    SquarePictures,
    TiledVisionSpec,
    VisionSpec,
    WindowedPictures,
)
from liger_models.layers.vision.compressed_encoder import Compression
from liger_models.layers.vision.crops import POOLED, crop_of, crops_and_tokens, crops_in_grid, crops_of
from liger_models.layers.vision.grid_inputs import BLOCK, tiles_and_tokens
from liger_models.layers.vision.pictures import Pictures, QueriedPictures
from liger_models.layers.vision.projectors import OF_GRIDS, PROJECTORS


@dataclass(frozen=True)
class Shown:
    """Sizes of the images that one GPU processes at a time.

    Attributes:
        tokens: of the encoder: patches, class tokens and padding of tiles.
        longest: maximum number of tokens that attend to one another.
        window: the same in layers with windows; 0: there are none.
        patches: rows of pixels.
        features: image tokens of the language model.
        read: features that layers of the language model read by cross-attention.
        pixels: bytes of the processor's outputs on the GPU.
        places: of windows over grids, some of which reach beyond these; 0: there are none.
        axes: the rows and columns of its picture for each patch, summed over all patches.
        merged: tokens of the layers after a merger or of an encoder's second part.
        longest_merged: the maximum number of these that attend to one another.
    """

    tokens: int = 0
    longest: int = 0
    window: int = 0
    patches: int = 0
    features: int = 0
    read: int = 0
    pixels: int = 0
    places: int = 0
    axes: int = 0
    merged: int = 0
    longest_merged: int = 0

    def no_more_than(self, other: Shown) -> bool:
        """Return True if no number is larger than the other's."""
        return self.at_least(other) == other

    def at_least(self, other: Shown) -> Shown:
        """The larger value of each number."""
        return Shown(*map(max, astuple(self), astuple(other)))


NOTHING = Shown()


def shown_by(spec: VisionSpec | TiledVisionSpec | None, pictures: Any) -> Shown:
    """Sizes of a call's images, if any; pixels count where they are stored."""
    if spec is None or pictures is None:
        return NOTHING
    if isinstance(spec, TiledVisionSpec):
        return _tiles(spec, *pictures.ratios.shape)
    merge, extra = spec.merge, int(spec.class_token is not None) + spec.prefix_tokens
    frames, longest = pictures.lengths, max(pictures.lengths) + extra
    window = 0 if spec.window is None else min((spec.window * merge) ** 2, longest)
    tokens = sum(frames) + extra * len(frames)
    shown = Shown(tokens, longest, window, sum(frames), sum(pictures.features(merge)))
    if spec.merger is not None:
        block = spec.merger.merge**2
        shown = replace(shown, merged=tokens // block, longest_merged=longest // block)
    if spec.query_encoder is not None:
        merged = [sum(spec.query_encoder.tokens_of(count)) for count in frames]
        shown = replace(shown, merged=sum(merged), longest_merged=max(merged))
    windows = {block.mixer.window for block in spec.blocks if isinstance(block.mixer, GridAttentionSpec)}
    if windows:
        shown = replace(shown, axes=sum(t * h * w * (h + w) for t, h, w in pictures.grids))
    for side in (window for window in windows if window is not None):
        places = (-(-h // side) * -(-w // side) * t for t, h, w in pictures.grids)
        shown = replace(shown, places=side**2 * sum(places))
    return shown


def shown_of_size(
    spec: VisionSpec | TiledVisionSpec, images: int, height: int, width: int, rows: int = 1
) -> Shown:
    """Sizes of `images` images per row, for an image size in pixels: the size after the family's processor,
    which may allow several.
    """
    if not images:
        return NOTHING
    if isinstance(spec, TiledVisionSpec):
        shown = _tiles(spec, rows, images)
        return _with_pixels(shown, rows * images * spec.tiles * spec.patches.channels * spec.image_size**2)
    count, size, merge = rows * images, spec.patches.size, spec.merge
    match spec.pictures:
        case SquarePictures(side):
            grids = [(1, side // size, side // size)] * count
        case AnyresPictures(side, resolutions, most):
            grid = side // size
            taps, tiles = of_whole(grid), 1
            if images == 1:
                h, w = (x // side for x in best_resolution(height, width, resolutions))
                taps, tiles = of_tiles(grid, h, w, height, width, most), 1 + h * w
            grids = [(1, grid, grid)] * (tiles * count)
            shown = shown_by(spec, Pictures(torch.empty(0, device="meta"), grids, len(grids)))
            return _with_pixels(
                Shown(shown.tokens, shown.longest, 0, shown.patches, count * len(taps.features)),
                shown.patches * spec.patches.width,
            )
        case CroppedPictures(side, most):
            crop = crop_of(side) if most is None else side * 3 // 4
            made = crops_of(height, width, side) if most is None else crops_in_grid(height, width, crop, most)
            crops = [(1, crop // size, crop // size)] * made
            grids = [*crops, (1, side // size, side // size)] * count
            if spec.query_encoder is not None:
                own = sum(spec.query_encoder.tokens_of(h * w)[1] for _, h, w in grids[: 1 + made])
                pictures = QueriedPictures(torch.empty(0, device="meta"), grids, [1 + own] * count)
                shown = shown_by(spec, pictures)
                return _with_pixels(shown, shown.patches * spec.patches.width)
        case PartlyHiddenTiles(side):
            rows_of_tiles, columns_of_tiles = (max(1, math.ceil(x / side)) for x in (height, width))
            grid = side // size
            whole = rows_of_tiles * grid, columns_of_tiles * grid
            tiles_made, lines = tiles_and_tokens(grid, rows_of_tiles, columns_of_tiles, *whole)
            grids = [(1, grid, grid)] * (count * len(tiles_made))
            shown = shown_by(spec, Pictures(torch.empty(0, device="meta"), grids, len(grids)))
            shown = replace(shown, features=count * len(lines))
            return _with_pixels(shown, shown.patches * spec.patches.width)
        case WindowedPictures(side):
            crops_of_image, tokens = crops_and_tokens(height, width, side, size)
            grids = [(1, side, side)] * (count * crops_of_image)
            shown = shown_by(spec, Pictures(torch.empty(0, device="meta"), grids, len(grids)))
            return _with_pixels(replace(shown, features=count * tokens), shown.patches * spec.patches.width)
        case MaskedPictures(by_patches):
            patches, tokens = max(by_patches)
            scale = math.isqrt(patches) / max(height, width)
            h, w = (max(1, math.ceil(x * scale)) for x in (height, width))
            grids = [(1, h, w)] * count
            shown = shown_by(spec, Pictures(torch.empty(0, device="meta"), grids, len(grids)))
            pixels = count * patches * spec.patches.width
            return _with_pixels(replace(shown, features=count * tokens), pixels)
        case PaddedPictures():
            grids = [(1, max(merge, height // size), max(merge, width // size))] * count
        case _:
            block = size * merge
            grids = [(1, merge * max(1, round(height / block)), merge * max(1, round(width / block)))] * count
    nothing = torch.empty(0, device="meta")
    extra, rows_end = int(spec.class_feature), spec.rows_end
    shown = shown_by(spec, Pictures(nothing, grids, len(grids), extra=extra, rows_end=rows_end))
    return _with_pixels(shown, shown.patches * spec.patches.width)


def _tiles(spec: TiledVisionSpec, rows: int, images: int) -> Shown:
    patches = (spec.image_size // spec.patches.size) ** 2
    tiles, in_tile = rows * images * spec.tiles, patches + 1 + -(patches + 1) % 8
    of_image = spec.tiles * in_tile
    tokens = rows * images * of_image
    return Shown(
        tokens,
        longest=of_image,
        patches=tiles * patches,
        features=rows * images,
        read=tiles * (patches + 1),
    )


def _with_pixels(shown: Shown, numbers: int) -> Shown:
    return replace(shown, pixels=4 * numbers)


@dataclass(frozen=True)
class Edges:
    """Bytes kept outside the encoder's layers.

    Attributes:
        encoder: before and after its layers.
        projector: including its input.
        language: by layers of the language model, in total.
        backward: needed by the projector's backward pass in addition to these, including the gradients of its
            parameters and of its input.
        state: the gradient of one encoder layer's output that the language model reads; those of earlier
            layers wait for the layer.
        merger: needed by the backward pass of a merger between layers, or of an encoder without layers, in
            addition to these, as `backward`.
    """

    encoder: int = 0
    projector: int = 0
    language: int = 0
    backward: int = 0
    state: int = 0
    merger: int = 0


def edges_of(
    spec: VisionSpec | TiledVisionSpec,
    shown: Shown,
    hidden_size: int,
    dtype: torch.dtype,
    trained: tuple[bool, bool],
) -> Edges:
    """Memory kept for images outside of the encoder's layers.

    Args:
        spec: of the encoder and the projector.
        shown: the images.
        hidden_size: of the language model, H.
        dtype: of the parameters.
        trained: (encoder is trained, projector is trained).
    """
    encoder = trained[0]
    if not shown.patches or not any(trained):
        return Edges()
    if isinstance(spec, TiledVisionSpec):
        return _edges_of_tiles(spec, shown, hidden_size, dtype, encoder)
    kept, merger = _outside_layers(spec, shown, dtype, encoder)
    patches = _projected(spec, shown)
    ways = _measured_projectors(spec, shown, patches, hidden_size, dtype, encoder)
    state = encoder * patches * spec.feature_size * dtype.itemsize
    features = shown.features * hidden_size * dtype.itemsize
    # The last one is the first of the backward pass. By then gradients of the others' outputs exist; those
    # of its input and its parameters wait for the others.
    backward = done = 0
    for waiting, (one, gradients) in reversed(list(enumerate(ways))):
        backward = max(backward, done + one.backward + waiting * features)
        done += gradients + state - one.saved
    saved = sum(one.saved for one, _ in ways)
    # The input of the encoder's next layer is shared with that layer.
    return Edges(
        encoder=encoder * kept,
        projector=saved - len(spec.deep) * state,
        language=len(spec.feature_layers) * features,
        backward=backward,
        state=state,
        merger=merger.backward,
    )


def _edges_of_tiles(
    spec: TiledVisionSpec, shown: Shown, hidden_size: int, dtype: torch.dtype, encoder: bool
) -> Edges:
    width, size = spec.hidden_size, dtype.itemsize
    kept = shown.patches * spec.patches.width * size
    # The positions scaled by a gate, the inputs and statistics of two norms, and per token its position in
    # both orders and its range of visible keys.
    kept += shown.read * width * max(size, 4) + 2 * shown.tokens * (width * size + 8)
    kept += shown.tokens * (2 * 8 + 2 * 4)
    linear = nn.Linear(spec.width, hidden_size, device="meta", dtype=dtype)
    made = measured(linear, shown.read, spec.width, dtype, encoder)
    return Edges(encoder * kept, made.saved, shown.read * hidden_size * size, made.backward)


def _outside_layers(
    spec: VisionSpec, shown: Shown, dtype: torch.dtype, encoder: bool
) -> tuple[int, Measured]:
    """Bytes that an encoder keeps before, between and after its layers, and its merger."""
    width, size = spec.hidden_size, dtype.itemsize
    kept, tokens, merger = shown.patches * spec.patches.width * size, shown.tokens, Measured(0, 0)
    if spec.merger is not None:
        with torch.device("meta"):
            within = WindowMerger(width, spec.merger, spec.projector.merge).to(dtype)
        merger = measured(within, tokens, width, dtype, encoder)
        kept, tokens = kept + merger.saved, shown.merged
    if spec.query_encoder is not None:
        side = spec.query_encoder.merge
        with torch.device("meta"):
            compression = Compression(width, spec.query_encoder).to(dtype)
        merger = measured(compression, tokens, width, dtype, encoder, [(side, tokens // side)])
        kept, tokens = kept + merger.saved, shown.merged
        kept += tokens * (spec.feature_size * size + 8)  # the norm after all
    if spec.pyramid is not None and isinstance(spec.pictures, SquarePictures):
        side = spec.pictures.size // spec.patches.size
        own, again = numbers_kept(spec, spec.pictures.size)
        count = shown.patches // side**2
        kept, merger = kept + count * own * size, Measured(0, encoder * count * again * size)
    norms = [x for x in (spec.norm_patches, spec.norm_before) if x is not None]
    kept += (len(norms) * shown.tokens + (spec.norm_after is not None) * tokens) * (width * size + 8)
    if spec.norm_pixels is not None:
        kept += shown.patches * (spec.patches.width * size + 8)
    return kept, merger


def _projected(spec: VisionSpec, shown: Shown) -> int:
    """Number of the encoder's outputs that the projectors read."""
    if spec.query_encoder is not None:
        return shown.merged - shown.tokens // spec.query_encoder.merge**2
    if isinstance(spec.pictures, PooledGrids):
        return shown.features
    if spec.class_feature:
        return shown.tokens
    return shown.patches // spec.merge**2 * spec.projector.merge**2


def _measured_projectors(
    spec: VisionSpec, shown: Shown, patches: int, hidden_size: int, dtype: torch.dtype, encoder: bool
) -> list[tuple[Measured, int]]:
    """Memory of each projector, and bytes of the gradients of its parameters."""
    width = spec.feature_size
    taken = max(len(spec.taken), 1) * width
    found = []
    for wide, projector_spec in [(taken, spec.projector), *((width, spec.deep_projector) for _ in spec.deep)]:
        with torch.device("meta"):
            projector = PROJECTORS[type(projector_spec)](wide, hidden_size, projector_spec).to(dtype)
        grid = (1, projector_spec.merge, patches // projector_spec.merge)
        others: list[Any] = [[grid]] if isinstance(projector_spec, OF_GRIDS) else []
        if isinstance(spec.pictures, MaskedPictures):
            others = [[patches], [shown.features]]
        if isinstance(projector_spec, EndedProjectorSpec):
            others = [[], [patches + 1]]
        if isinstance(spec.pictures, PartlyHiddenTiles):
            others = [torch.zeros(shown.features, BLOCK**2, dtype=torch.long, device="cpu")]
        if isinstance(spec.pictures, WindowedPictures):
            others = [torch.empty(shown.features, POOLED**2, dtype=torch.long, device="meta")]
        gradients = sum(p.nbytes for p in projector.parameters())
        found.append((measured(projector, patches, wide, dtype, encoder, *others), gradients))
    return found
