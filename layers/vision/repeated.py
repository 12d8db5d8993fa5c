"""Repeat the pictures of each row of a batch, for several sequences per prompt in generation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.specs import (
    FlatGrids,
    GridPictures,
    PooledGrids,
    TiledVisionSpec,
    VisionSpec,
    WindowedPictures,
)
from liger_models.layers.vision.crops import pictures_apart, renumbered
from liger_models.layers.vision.packing import of_patches
from liger_models.layers.vision.processor_inputs import take_pictures

_OF_VIDEOS = (
    *("pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video"),
    "target_sizes_videos",
    *("second_per_grid_ts", "video_second_per_grid", "video_merge_sizes", "video_compression_mask"),
)


def repeat_pictures(
    spec: VisionSpec | TiledVisionSpec, given: Mapping[str, Any], input_ids: Tensor, times: int
) -> dict[str, Any]:
    """A processor's outputs for images and videos of rows each repeated `times` in place: row 0, row 0, ...

    Args:
        spec: of the encoder.
        given: the outputs, for the rows of `input_ids` [batch, seq].

    Raises:
        DataError: the pictures do not match the tokens.
    """
    rows = len(input_ids)
    form = None if isinstance(spec, TiledVisionSpec) else spec.pictures
    by_row = form is None or getattr(form, "by_row", False)
    if by_row:
        if wrong := [name for name, x in given.items() if len(x) != rows]:
            raise DataError(f"{wrong[0]} has {len(given[wrong[0]])} rows; expected {rows}, as input_ids")
        return {name: torch.as_tensor(x).repeat_interleave(times, 0) for name, x in given.items()}
    assert isinstance(spec, VisionSpec)
    merge = spec.merge
    pictures = take_pictures(spec, merge, dict(given))
    assert pictures is not None
    counts = pictures.counts(merge)
    images, videos = counts[: pictures.images], counts[pictures.images :]
    if isinstance(form, WindowedPictures):  # with the tokens of images, videos too
        order = order_of((input_ids == spec.image_id).sum(1).tolist(), images, times)
        apart = pictures_apart(given, images)
        chosen = renumbered([apart[i] for i in order])
        return {name: torch.cat([own[name] for own in chosen]) for name in given}
    frames = torch.as_tensor(given.get("num_frames_per_video", [])).flatten().tolist()
    if len(videos) == sum(frames) != len(frames):  # each frame is a picture
        ends = list(itertools.accumulate(frames, initial=0))
        videos = [sum(videos[start:end]) for start, end in itertools.pairwise(ends)]
    made: dict[str, Any] = {}
    for name, x in given.items():
        if name == "batch_num_images":  # of rows
            made[name] = torch.as_tensor(x).repeat_interleave(times, 0)
            continue
        of_videos = name in _OF_VIDEOS
        token = spec.video_id if of_videos else spec.image_id
        own = videos if of_videos else images
        tokens = torch.eq(input_ids, -1 if token is None else token).sum(1).tolist()
        order = order_of(tokens, own, times)
        if isinstance(x, Tensor):
            dim = of_patches(spec, name)
            pieces = x.split(_sizes(spec, name, given, len(own)), dim)
            made[name] = torch.cat([pieces[i] for i in order], dim)
        else:
            made[name] = [x[i] for i in order]
    return made


def order_of(tokens: Sequence[int], counts: Sequence[int], times: int) -> list[int]:
    """The pictures or sounds of each row, repeated: `tokens` of the rows, `counts` of each picture.

    Raises:
        DataError: the tokens of a row are not whole pictures.
    """
    order, number = [], 0
    for row, total in enumerate(tokens):
        own = []
        while total > 0 and number < len(counts):
            own.append(number)
            total -= counts[number]
            number += 1
        if total:
            raise DataError(
                f"the placeholder tokens of row {row} are not whole pictures or sounds in their order"
            )
        order += own * times
    if number < len(counts):
        raise DataError(f"the text has tokens of {number} pictures or sounds, and {len(counts)} are given")
    return order


def _sizes(spec: VisionSpec, name: str, given: Mapping[str, Any], pictures: int) -> list[int]:
    """The number of entries of each picture in an output of the processor."""
    if name.startswith("pixel_values") and isinstance(spec.pictures, GridPictures | PooledGrids):
        of_images = "image_grid_hw" if isinstance(spec.pictures, FlatGrids) else "image_grid_thw"
        grids = given["video_grid_thw" if name in _OF_VIDEOS else of_images]
        return torch.as_tensor(grids).prod(1).tolist()
    if of_patches(spec, name):
        sizes = given["target_sizes_videos" if name in _OF_VIDEOS else "target_sizes"]
        return (torch.as_tensor(sizes).prod(1) * spec.patches.size).tolist()
    if name == "video_compression_mask":
        sides = torch.as_tensor(given["video_merge_sizes"]).flatten()
        return (torch.as_tensor(given["video_grid_thw"]).prod(1) // sides**2).tolist()
    if name in ("pixel_values_videos", "video_position_ids") and "num_frames_per_video" in given:
        return torch.as_tensor(given["num_frames_per_video"]).flatten().tolist()
    if name == "pixel_values_local":
        return torch.as_tensor(given["num_local_patches"]).flatten().tolist()
    return [1] * pictures
