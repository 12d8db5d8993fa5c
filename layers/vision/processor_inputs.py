"""Build `Pictures` from the outputs of a processor.

Outputs differ between families: `VisionSpec.pictures` names their form, and `READERS` has a reader for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers.grids.anyres import Taps, best_resolution, of_tiles, of_video, of_whole
from liger_models.layers.specs import (
    AnyresPictures,
    AxesTable,
    CroppedPictures,
    CubicTable,
    FlatGrids,
    FractionTable,
    GridPictures,
    MaskedPictures,
    PaddedPictures,
    PartlyHiddenTiles,
    PlacedPictures,
    PooledGrids,
    ShapedPictures,
    SquarePictures,
    StripPictures,
    VisionSpec,
    WindowedPictures,
)
from liger_models.layers.vision.crops import cropped, masked, windowed
from liger_models.layers.vision.grid_inputs import (
    flat_grids,
    grids,
    hidden_tiles,
    pooled_grids,
    strips,
    taken,
    together,
)
from liger_models.layers.vision.patch_order import Grid, channels_first, cut_image, places_in_picture
from liger_models.layers.vision.pictures import Pictures, TiledPictures

HIDDEN_IN_PART = (
    "pixel_attention_mask hides a part of an image; expected whole images, as the processor makes them from "
    "tiles or by resizing to squares"
)


def take_pictures(
    spec: VisionSpec, merge: int, keywords: dict[str, Any], all_shown: bool = False
) -> Pictures | None:
    """Remove the picture keywords from a call's keywords and return them as pictures; None if there are none.

    `all_shown` expects that no images fill up rows: those that do are encoded, too, and have no tokens.

    Raises:
        DataError: missing keywords, or incompatible shapes, dtypes or counts.
    """
    if all_shown and isinstance(spec.pictures, SquarePictures):
        return _squares(spec, merge, keywords, all_shown)
    return READERS[type(spec.pictures)](spec, merge, keywords)


def _padded(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    given = taken(keywords, "pixel_values", "image_sizes")
    if not together(given, "pixel_values", "image_sizes"):
        return None
    values, sizes = given["pixel_values"], torch.as_tensor(given["image_sizes"])
    size, channels = spec.patches.size, spec.patches.channels
    if values.dim() != 4 or values.shape[1] != channels or not values.is_floating_point():
        raise DataError(
            f"pixel_values must be floating point of shape [images, {channels}, height, width]; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if tuple(sizes.shape) != (len(values), 2) or sizes.is_floating_point():
        raise DataError(
            f"image_sizes must be integers [{len(values)}, 2], the height and the width of each image in "
            f"pixels; found {sizes.dtype} of shape {tuple(sizes.shape)}"
        )
    patches, grids = [], []
    for i, (image, (height, width)) in enumerate(zip(values, sizes.tolist(), strict=True)):
        if min(height, width) < size * merge or height > image.shape[1] or width > image.shape[2]:
            raise DataError(
                f"image_sizes[{i}] is {(height, width)}; expected at least {size * merge} pixels on either "
                f"side, which make a token, and at most the {tuple(image.shape[1:])} of pixel_values"
            )
        grid = (1, height // size, width // size)
        patches.append(cut_image(image, grid, merge, size))
        grids.append(grid)
    return Pictures(torch.cat(patches), grids, len(grids))


def _placed(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    names = "pixel_values", "image_position_ids"
    of_videos = "pixel_values_videos", "video_position_ids", "num_frames_per_video"
    given = taken(keywords, *names, *of_videos)
    parts = [
        _placed_of_kind(spec, merge, given[kind[0]], torch.as_tensor(given[kind[1]]), *kind[:2])
        for kind in (names, of_videos)
        if together(given, *kind)
    ]
    if not parts:
        return None
    steps = len(parts[-1][1])
    counts = given.get("num_frames_per_video")
    if counts is not None and int(torch.as_tensor(counts).sum()) != steps:
        raise DataError(f"num_frames_per_video is {counts}, of {steps} steps together; expected their number")
    grids = [grid for _, own in parts for grid in own]
    images = len(grids) - (0 if counts is None else steps)
    return Pictures(torch.cat([patches for patches, _ in parts]), grids, images)


def _placed_of_kind(
    spec: VisionSpec, merge: int, values: Tensor, places: Tensor, pixels: str, ids: str
) -> tuple[Tensor, list[Grid]]:
    if values.dim() != 3 or values.shape[2] != spec.patches.width or not values.is_floating_point():
        raise DataError(
            f"{pixels} must be floating point of shape [pictures, patches, {spec.patches.width}]; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if tuple(places.shape) != (*values.shape[:2], 2) or places.is_floating_point():
        raise DataError(
            f"{ids} must be integers of shape {(*values.shape[:2], 2)}, by {pixels}; found {places.dtype} of "
            f"shape {tuple(places.shape)}"
        )
    places = places.cpu()
    patches, grids = [], []
    assert isinstance(spec.position_table, AxesTable)
    for i, (picture, own) in enumerate(zip(values, places, strict=True)):
        w, h = (own.amax(0) + 1).tolist()
        row, column = places_in_picture(1, h, w, 1) if min(h, w) > 0 else own.new_zeros(2, 0)
        filled = torch.full_like(own, -1)
        filled[: h * w] = torch.stack([column, row], 1)[: len(own)]
        if min(h, w) < 1 or h % merge or w % merge or not torch.equal(filled, own):
            raise DataError(
                f"{ids}[{i}] must name the patches of {h} rows and {w} columns, row by row, and -1 after "
                f"them, rows and columns multiples of {merge}; it does not"
            )
        if max(h, w) > spec.position_table.size:
            raise DataError(
                f"{ids}[{i}] has {h} rows and {w} columns; the model has positions for "
                f"{spec.position_table.size}"
            )
        row, column = to_device(places_in_picture(1, h, w, merge), values.device)
        patches.append(picture[row * w + column])
        grids.append((1, h, w))
    made = channels_first(spec.patches, torch.cat(patches))
    assert isinstance(spec.pictures, PlacedPictures)
    return 2 * (made - 0.5) if spec.pictures.centred else made, grids


def _shaped(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    names = "pixel_values", "spatial_shapes", "pixel_attention_mask"
    given = taken(keywords, *names)
    if not together(given, *names):
        return None
    values, shapes, mask = given[names[0]], *(torch.as_tensor(given[name]).cpu() for name in names[1:])
    if values.dim() != 3 or values.shape[2] != spec.patches.width or not values.is_floating_point():
        raise DataError(
            f"pixel_values must be floating point of shape [images, patches, {spec.patches.width}]; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if (
        tuple(shapes.shape) != (len(values), 2)
        or shapes.is_floating_point()
        or mask.shape != values.shape[:2]
    ):
        raise DataError(
            f"spatial_shapes must be integers [{len(values)}, 2] and pixel_attention_mask "
            f"{tuple(values.shape[:2])}, by pixel_values; found {shapes.dtype} of shape "
            f"{tuple(shapes.shape)} and {tuple(mask.shape)}"
        )
    patches, grids = [], []
    for i, (image, (h, w), own) in enumerate(zip(values, shapes.tolist(), mask, strict=True)):
        fits = min(h, w) > 0 and h % merge == w % merge == 0 and h * w <= len(own)
        if not fits or not torch.equal(own != 0, torch.arange(len(own)) < h * w):
            raise DataError(
                f"spatial_shapes[{i}] is {(h, w)}; expected rows and columns of patches, multiples of "
                f"{merge}, whose product is the number of leading ones in pixel_attention_mask[{i}], here "
                f"{int((own != 0).sum())} of {len(own)}"
            )
        row, column = to_device(places_in_picture(1, h, w, merge), values.device)
        patches.append(image[row * w + column])
        grids.append((1, h, w))
    if not patches:
        return None
    return Pictures(channels_first(spec.patches, torch.cat(patches)), grids, len(grids))


def _squares(
    spec: VisionSpec, merge: int, keywords: dict[str, Any], all_shown: bool = False
) -> Pictures | None:
    assert isinstance(spec.pictures, SquarePictures)
    given = taken(keywords, "pixel_values", *(["pixel_attention_mask"] if spec.pictures.by_row else []))
    if "pixel_values" not in given:
        return None
    values, shown = given["pixel_values"], None
    if spec.pictures.by_row:
        values, shown = _images_of_rows(values, given.get("pixel_attention_mask"), all_shown)
    size = _side_of_squares(spec, merge, values)
    expected = spec.patches.channels, size, size
    if values.dim() != 4 or tuple(values.shape[1:]) != expected or not values.is_floating_point():
        raise DataError(
            f"pixel_values must be floating point of shape [images, {', '.join(map(str, expected))}], to "
            f"which the model's processor resizes every image; found {values.dtype} of shape "
            f"{tuple(values.shape)}"
        )
    side = size // spec.patches.size
    if not len(values):
        return None
    patches = cut_image(values, (1, side, side), merge, spec.patches.size)
    grids: list[Grid] = [(1, side, side)] * len(values)
    return Pictures(patches, grids, len(values), extra=int(spec.class_feature), shown=shown)


def _images_of_rows(values: Tensor, mask: Any, all_shown: bool) -> tuple[Tensor, Tensor | None]:
    """The images of all rows, [images, channels, height, width], without those that fill up a row; or all on
    a device, with `shown` of `Pictures`: 1 for images with tokens, 0 for others, 2 for a faulty mask.

    Args:
        values: [rows, images, channels, height, width].
        mask: [rows, images, height, width], 0 for images that fill up a row. Without it these are the images
            of zeros.
        all_shown: do not read their number on the host, which synchronises a device that holds the mask.

    Raises:
        DataError: another shape, or an image that is hidden in part.
    """
    if values.dim() != 5:
        raise DataError(
            "pixel_values must be of shape [rows, images, channels, size, size], as the processor returns "
            f"them; found {tuple(values.shape)}"
        )
    if mask is None:
        found = (values != 0).flatten(2).any(-1).flatten()
        if all_shown and _waits(found):
            return values.flatten(0, 1), found.long()
        there: list[bool] = found.tolist()
    else:
        mask = torch.as_tensor(mask)
        if mask.shape != (*values.shape[:2], *values.shape[3:]):
            raise DataError(
                f"pixel_attention_mask has the shape {tuple(mask.shape)}; expected "
                f"{(*values.shape[:2], *values.shape[3:])}, by pixel_values"
            )
        mask = (mask != 0).flatten(2).flatten(0, 1)
        both = torch.stack([mask.any(-1), mask.all(-1)])
        if all_shown and _waits(both):
            return values.flatten(0, 1), torch.where(both[0] == both[1], both[0].long(), 2)
        there, whole = both.tolist()
        if there != whole:
            raise DataError(HIDDEN_IN_PART)
    images = values.flatten(0, 1)
    if all(there):
        return images, None
    numbers = [number for number, shows in enumerate(there) if shows]
    shown = torch.tensor(numbers, dtype=torch.long, device="cpu")
    return images[to_device(shown, values.device)], None


def _waits(x: Tensor) -> bool:
    """Whether reading x on the host waits for a device."""
    return not x.is_cpu


def _side_of_squares(spec: VisionSpec, merge: int, values: Tensor) -> int:
    """The side in pixels that positions are made for; for interpolated positions the side of the given
    images, if its patches form complete blocks.
    """
    assert isinstance(spec.pictures, SquarePictures)
    if isinstance(spec.position_table, CubicTable | FractionTable) and values.dim() == 4:
        patches = values.shape[-1] // spec.patches.size
        if patches and patches % merge == 0:
            return values.shape[-1]
    return spec.pictures.size


def _anyres(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    assert isinstance(spec.pictures, AnyresPictures)
    of_rows = () if spec.pictures.most is None else ("batch_num_images",)
    of_videos = () if spec.video_id is None else ("pixel_values_videos", "num_frames_per_video")
    given = taken(keywords, "pixel_values", "image_sizes", *of_rows, *of_videos)
    side, pool = _anyres_side(spec), spec.pictures.frame_pool
    tiles, taps = _tiles_of_images(spec, given)
    images = len(tiles)
    if "pixel_values_videos" in given:
        tiles += _frames_of_videos(spec, given["pixel_values_videos"], given.get("num_frames_per_video"))
        taps += [of_video(side, len(video), pool) for video in tiles[images:]]
    if not tiles:
        return None
    patches = cut_image(torch.cat(tiles), (1, side, side), merge, spec.patches.size)
    counts, tokens = [len(tile) for tile in tiles], spec.pictures.token_side
    return TiledPictures(patches, side, taps, counts, images, pool, tokens)


def _frames_of_videos(spec: VisionSpec, values: Tensor, counts: Any) -> list[Tensor]:
    """The frames of each video, [frames, channels, size, size], for videos of one length, or of several
    lengths by `counts`.
    """
    if counts is None:
        _check_tiles("pixel_values_videos", "frames", values, spec)
        return list(values)
    _check_tiles("pixel_values_videos", "1", values[:, None], spec)
    lengths = torch.as_tensor(counts).flatten().tolist()
    if sum(lengths) != len(values):
        raise DataError(
            f"num_frames_per_video is {lengths}, {sum(lengths)} frames together; found {len(values)}"
        )
    return list(values.split(lengths))


def _anyres_side(spec: VisionSpec) -> int:
    assert isinstance(spec.pictures, AnyresPictures)
    return spec.pictures.size // spec.patches.size


def _tiles_of_images(spec: VisionSpec, given: Mapping[str, Any]) -> tuple[list[Tensor], list[Taps]]:
    """The tiles of each image, [tiles, channels, size, size], and the taps of its tokens."""
    assert isinstance(spec.pictures, AnyresPictures)
    if not together(given, "pixel_values", "image_sizes"):
        if "batch_num_images" in given:
            raise DataError("got batch_num_images without pixel_values: pass all, as the processor does")
        return [], []
    values, sizes = given["pixel_values"], torch.as_tensor(given["image_sizes"])
    _check_tiles("pixel_values", "tiles", values, spec)
    if tuple(sizes.shape) != (len(values), 2) or sizes.is_floating_point() or bool((sizes < 1).any()):
        raise DataError(
            f"image_sizes must be integers above 0 [{len(values)}, 2], the height and the width of each "
            f"image in pixels; found {sizes.dtype} of shape {tuple(sizes.shape)}"
        )
    alone = _alone(given.get("batch_num_images"), len(values))
    tiles, taps, size = [], [], spec.pictures.size
    side = spec.pictures.token_side or _anyres_side(spec)
    for i, (image, (height, width), tiled) in enumerate(zip(values, sizes.tolist(), alone, strict=True)):
        h, w = best_resolution(height, width, spec.pictures.resolutions)
        count = 1 + h // size * (w // size) if tiled else 1
        if len(image) < count:
            raise DataError(
                f"pixel_values[{i}] has {len(image)} tiles; an image of {(height, width)} pixels has {count} "
                "by the model's resolutions"
            )
        tiles.append(image[:count])
        many = spec.pictures.most
        taps.append(of_tiles(side, h // size, w // size, height, width, many) if tiled else of_whole(side))
    return tiles, taps


def _check_tiles(name: str, many: str, values: Tensor, spec: VisionSpec) -> None:
    assert isinstance(spec.pictures, AnyresPictures)
    expected = spec.patches.channels, spec.pictures.size, spec.pictures.size
    if values.dim() != 5 or tuple(values.shape[2:]) != expected or not values.is_floating_point():
        raise DataError(
            f"{name} must be floating point of shape [pictures, {many}, {', '.join(map(str, expected))}]; "
            f"found {values.dtype} of shape {tuple(values.shape)}"
        )


def _alone(given: Any, images: int) -> list[bool]:
    """Return for each image True if it is the only one of its row."""
    if given is None:
        return [True] * images
    counts = torch.as_tensor(given).flatten().tolist()
    if sum(counts) != images:
        raise DataError(f"batch_num_images is {counts}, {sum(counts)} images together; found {images}")
    return [count == 1 for count in counts for _ in range(count)]


READERS: dict[type, Callable[[VisionSpec, int, dict[str, Any]], Pictures | None]] = {
    GridPictures: grids,
    FlatGrids: flat_grids,
    PooledGrids: pooled_grids,
    StripPictures: strips,
    PaddedPictures: _padded,
    SquarePictures: _squares,
    CroppedPictures: cropped,
    WindowedPictures: windowed,
    MaskedPictures: masked,
    PartlyHiddenTiles: hidden_tiles,
    PlacedPictures: _placed,
    ShapedPictures: _shaped,
    AnyresPictures: _anyres,
}
