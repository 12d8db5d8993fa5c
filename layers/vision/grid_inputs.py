"""Build `Pictures` from the outputs of processors that give patches with the grid of each picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.specs import ClipTable, ClockSpec, FlatGrids, GridPictures, TimeSpec, VisionSpec
from liger_models.layers.vision.patch_order import Grid, in_blocks
from liger_models.layers.vision.pictures import Pictures, PooledPictures

DOWNSAMPLING = "downsample_mode"
ROUNDED = (torch.bfloat16, torch.float16)  # too coarse for the seconds of videos


def grids(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Pictures as patches with the grid of each."""
    timed: TimeSpec | None = None
    if isinstance(spec.positions, TimeSpec) and spec.positions.tokens_per_second is not None:
        timed = spec.positions
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    given = taken(keywords, *names, *([timed.seconds] if timed else []))  # elsewhere ignored
    images, image_grids = _of_kind(spec, merge, given, "pixel_values", "image_grid_thw")
    videos, video_grids = _of_kind(spec, merge, given, "pixel_values_videos", "video_grid_thw")
    seconds = _seconds(timed, given, video_grids) if timed else None
    patches = [values for values in (images, videos) if values is not None]
    if not patches:
        return None
    grids = image_grids + video_grids
    forms: dict[str, Any] = {"clips": spec.clips, "joined": spec.joined_steps}
    if spec.rows_end:
        forms["rows_end"] = True
        for i, (t, _, _) in enumerate(grids):
            if t != 1:
                raise DataError(f"image_grid_thw[{i}] has {t} time steps; expected images, which have 1")
    if spec.paired:
        _check_pairs(image_grids, video_grids)
        forms["paired"] = True
    return Pictures(torch.cat(patches), grids, len(image_grids), seconds, **forms)


def _check_pairs(images: list[Grid], videos: list[Grid]) -> None:
    """Check the time steps of pictures whose videos make tokens of two at a time."""
    for i, (t, _, _) in enumerate(images):
        if t != 1:
            raise DataError(f"image_grid_thw[{i}] has {t} time steps; an image has 1: give it as a video")
    for i, (t, _, _) in enumerate(videos):
        if t % 2:
            raise DataError(
                f"video_grid_thw[{i}] has {t} time steps, two of which make a token together; expected an "
                "even number, as the processor samples"
            )


def flat_grids(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Images as patches with the rows and columns of each: see `FlatGrids`."""
    given = taken(keywords, "pixel_values", "image_grid_hw")
    patches, grids = _of_kind(spec, merge, given, "pixel_values", "image_grid_hw")
    return None if patches is None else Pictures(patches, grids, len(grids))


def _of_kind(
    spec: VisionSpec, merge: int, given: Mapping[str, Any], pixels: str, grids: str
) -> tuple[Tensor | None, list[Grid]]:
    if not together(given, pixels, grids):
        return None, []
    raster = isinstance(spec.pictures, GridPictures) and spec.pictures.raster
    values, table = given[pixels], torch.as_tensor(given[grids])
    values = values.flatten(1) if raster else values
    axes = ("height", "width") if isinstance(spec.pictures, FlatGrids) else ("time", "height", "width")
    if table.dim() != 2 or table.shape[1] != len(axes) or table.is_floating_point():
        raise DataError(
            f"{grids} must be integers [pictures, {len(axes)}], their patches in {', '.join(axes[:-1])} and "
            f"{axes[-1]}; found {table.dtype} of shape {tuple(table.shape)}"
        )
    shapes: list[Grid] = [(*(1,) * (3 - len(axes)), *sizes) for sizes in table.tolist()]
    for i, (t, h, w) in enumerate(shapes):
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise DataError(
                f"{grids}[{i}] is {(t, h, w)}; expected numbers above 0, height and width multiples of "
                f"{merge}, since so many patches side by side make one token"
            )
        if isinstance(spec.position_table, ClipTable) and t > spec.position_table.steps:
            raise DataError(
                f"{grids}[{i}] has {t} time steps; the model has positions for {spec.position_table.steps}: "
                "give longer videos as several clips"
            )
    total, width = sum(t * h * w for t, h, w in shapes), spec.patches.width
    if tuple(values.shape) != (total, width) or not values.is_floating_point():
        raise DataError(
            f"{pixels} must be floating point of shape [{total}, {width}], by {grids} and the model's "
            f"patches; found {values.dtype} of shape {tuple(values.shape)}"
        )
    return in_blocks(values, shapes, spec.patches, merge) if raster else values, shapes


def _seconds(positions: TimeSpec, keywords: Mapping[str, Any], videos: list[Grid]) -> list[float] | None:
    name, clock = positions.seconds, isinstance(positions, ClockSpec)
    given = keywords.get(name)
    if given is None:
        if clock and videos:
            raise DataError(f"got videos without {name}, by which they get their positions: give it, too")
        return None
    if isinstance(given, Tensor) and given.dtype in ROUNDED:
        raise DataError(
            f"{name} came as {given.dtype}, in which the videos' positions would be others; give "
            "a list (mixed precision casts floating point tensors)"
        )
    seconds = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(seconds) != len(videos):
        raise DataError(f"{name} has {len(seconds)} values for {len(videos)} videos; expected as many")
    if isinstance(positions, ClockSpec) and positions.whole:
        rate = positions.tokens_per_second or 1
        for i, (second, (steps, _, _)) in enumerate(zip(seconds, videos, strict=True)):
            if steps > 1 and (rate * second) % 1:
                raise DataError(
                    f"{name}[{i}] is {second}, {rate * second} positions; positions that are not whole "
                    f"numbers are not supported: sample frames so that a time step is a multiple of 1/{rate} "
                    "seconds"
                )
    return seconds


def strips(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Pictures as patches next to one another: see `StripPictures`. Frames of videos, and slices, are
    pictures of their own.

    Raises:
        DataError: also another `downsample_mode` than the model's, which decides how many patches make a
            token.
    """
    names = "pixel_values", "target_sizes", "pixel_values_videos", "target_sizes_videos"
    given = taken(keywords, *names, DOWNSAMPLING)
    mode, own = given.get(DOWNSAMPLING), "4x" if spec.merger is None else "16x"
    if mode is not None and mode != own:
        raise DataError(
            f"{DOWNSAMPLING} is {mode!r}, and this model was loaded with {own!r}: change it in config.json "
            "and load the model again"
        )
    images, image_grids = _of_strips(spec, merge, given, *names[:2])
    videos, video_grids = _of_strips(spec, merge, given, *names[2:])
    patches = [values for values in (images, videos) if values is not None]
    return Pictures(torch.cat(patches), image_grids + video_grids, len(image_grids)) if patches else None


def _of_strips(
    spec: VisionSpec, merge: int, given: Mapping[str, Any], pixels: str, sizes: str
) -> tuple[Tensor | None, list[Grid]]:
    if not together(given, pixels, sizes):
        return None, []
    values, table = given[pixels], torch.as_tensor(given[sizes])
    if table.dim() != 2 or table.shape[1] != 2 or table.is_floating_point():
        raise DataError(
            f"{sizes} must be integers [pictures, 2], their patches in height and width; found {table.dtype} "
            f"of shape {tuple(table.shape)}"
        )
    grids: list[Grid] = [(1, h, w) for h, w in table.tolist()]
    for i, (_, h, w) in enumerate(grids):
        if min(h, w) < 1 or h % merge or w % merge:
            raise DataError(
                f"{sizes}[{i}] is {(h, w)}; expected numbers above 0, multiples of {merge}, since so many "
                "patches side by side make one token"
            )
    size, count = spec.patches.size, sum(h * w for _, h, w in grids)
    expected = (1, spec.patches.channels, size, count * size)
    if tuple(values.shape) != expected or not values.is_floating_point():
        raise DataError(
            f"{pixels} must be floating point of shape {expected}, by {sizes} and the model's patches; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if not grids:
        return None, []
    patches = values[0].unflatten(2, (count, size)).permute(2, 0, 1, 3).flatten(1)
    return in_blocks(patches, grids, spec.patches, merge), grids


def seconds_as_numbers(keywords: dict[str, Any]) -> dict[str, Any]:
    """Convert the seconds of videos in a call's keywords to numbers. Mixed precision of FSDP2 casts all
    floating point tensors in the arguments of a sharded module, and seconds in bfloat16 would shift the
    videos' positions.
    """
    for name in (TimeSpec.seconds, ClockSpec.seconds):
        seconds = keywords.get(name)
        if isinstance(seconds, Tensor) and seconds.dtype not in ROUNDED:
            keywords = keywords | {name: seconds.tolist()}
    return keywords


def pooled_grids(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """The same, with the number by which each is pooled: see `PooledGrids`."""
    names = "image_merge_sizes", "video_merge_sizes", "video_compression_mask"
    given, made = taken(keywords, *names), grids(spec, merge, keywords)
    images, videos = ([], []) if made is None else (made.grids[: made.images], made.grids[made.images :])
    sides = [*_sides(given, names[0], images), *_sides(given, names[1], videos)]
    mask = given.get(names[2])
    if mask is not None:
        mask, pooled = torch.as_tensor(mask).cpu(), zip(videos, sides[len(images) :], strict=True)
        count = sum(t * h * w // side**2 for (t, h, w), side in pooled)
        if mask.dtype != torch.bool or tuple(mask.shape) != (count,):
            raise DataError(
                f"{names[2]} must be bool [{count}], by the videos' grids and merge sizes; found "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
    if made is None:
        return None
    return PooledPictures(made.patches, made.grids, made.images, sides, mask)


def _sides(given: Mapping[str, Any], name: str, pictures: list[Grid]) -> list[int]:
    """The numbers under this name, one per picture."""
    sides = torch.as_tensor(given.get(name, [])).flatten().tolist()
    fit = len(sides) == len(pictures) and all(
        type(side) is int and side > 0 and h % side == w % side == 0
        for side, (_, h, w) in zip(sides, pictures, strict=True)
    )
    if not fit:
        raise DataError(
            f"{name} must be a whole number for each picture, by which the height and the width of its grid "
            f"can be divided; found {sides} for the grids {pictures}"
        )
    return sides


def taken(keywords: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the given names from the keywords and return those present."""
    return {name: value for name in names if (value := keywords.pop(name, None)) is not None}


def together(given: Mapping[str, Any], *names: str) -> bool:
    """Return True if all are given, False if none; raise DataError if some are missing."""
    there, missing = [n for n in names if n in given], [n for n in names if n not in given]
    if there and missing:
        raise DataError(
            f"got {' and '.join(there)} without {' and '.join(missing)}: give all, as the processor does"
        )
    return bool(there)
