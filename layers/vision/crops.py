"""Images as a whole and as crops.

Step 3.7 and DeepSeek-OCR 2: the whole image at one size, and if it is larger or long, parts of it at a
smaller size, whose tokens come first.

Molmo 2: the whole image, and overlapping crops of the enlarged image at the same size; or the frames of a
video. The processor names the patches that make each token.

Aria: images, or crops of them, in the upper left corner of squares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers.specs import CroppedPictures, MaskedPictures, VisionSpec, WindowedPictures
from liger_models.layers.vision.grid_inputs import taken, together
from liger_models.layers.vision.patch_order import Grid, channels_first, cut_image
from liger_models.layers.vision.pictures import Pictures, PicturesInWindows, QueriedPictures

LARGEST = 3024  # pixels of the longer side, to which larger images are reduced


class CroppedImages(Pictures):
    """Images of several pictures each.

    Attributes:
        parts: the number of pictures of each image.
    """

    def __init__(self, patches: Tensor, grids: list[Grid], parts: list[int]):
        super().__init__(patches, grids, len(parts))
        self.parts = parts

    def counts(self, merge: int) -> list[int]:
        each = iter(super().counts(merge))
        return [sum(next(each) for _ in range(count)) for count in self.parts]


def cropped(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Images and their crops: see `CroppedPictures`."""
    assert isinstance(spec.pictures, CroppedPictures)
    names = "pixel_values_local", "num_local_patches"
    given, size, patch = taken(keywords, "pixel_values", *names), spec.pictures.size, spec.patches.size
    if "pixel_values" not in given:
        together(given, "pixel_values", *names)
        return None
    whole, crops = given["pixel_values"], given.get(names[0])
    _check("pixel_values", whole, (spec.patches.channels, size, size))
    counts = torch.as_tensor(given.get(names[1], [0] * len(whole))).flatten().tolist()
    there = 0 if crops is None else len(crops)
    if len(counts) != len(whole) or any(count < 0 for count in counts) or sum(counts) != there:
        raise DataError(
            f"num_local_patches must give the number of crops of each of the {len(whole)} images, {there} in "
            f"pixel_values_local together; found {counts}"
        )
    pieces = []
    if crops is not None:
        _check(names[0], crops, (spec.patches.channels, *crops.shape[2:]))
        pieces = list(crops)
        height, width = (side // patch for side in crops.shape[2:])
        if min(height, width) < 1 or height % merge or width % merge:
            raise DataError(
                f"pixel_values_local are {tuple(crops.shape[2:])} pixels, {height} times {width} patches; "
                f"expected multiples of {merge} patches, which make a token"
            )
    first, pictures = 0, []
    for image, count in zip(whole, counts, strict=True):
        pictures += [*pieces[first : first + count], image]
        first += count
    if not pictures:
        return None
    grids: list[Grid] = [(1, x.shape[1] // patch, x.shape[2] // patch) for x in pictures]
    patches = [cut_image(x, grid, merge, patch) for x, grid in zip(pictures, grids, strict=True)]
    parts = [count + 1 for count in counts]
    if spec.query_encoder is not None:
        queries = iter([spec.query_encoder.tokens_of(h * w)[1] for _, h, w in grids])
        sizes = [1 + sum(next(queries) for _ in range(count)) for count in parts]
        return QueriedPictures(torch.cat(patches), grids, sizes)
    return CroppedImages(torch.cat(patches), grids, parts)


def _check(name: str, values: Tensor, expected: tuple[int, ...]) -> None:
    if values.dim() != 4 or tuple(values.shape[1:]) != expected or not values.is_floating_point():
        raise DataError(
            f"{name} must be floating point of shape [pictures, {', '.join(map(str, expected))}]; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )


def crop_of(size: int) -> int:
    """Side in pixels of the crops that a processor makes for whole images of this size."""
    return size * 504 // 728


def crops_of(height: int, width: int, size: int) -> int:
    """The number of crops that a processor makes of an image with these sides in pixels.

    They are squares of `crop_of(size)` pixels, of a longer image's shorter side at the most. A side that
    leaves more than a fifth of a crop over gets another one.
    """
    if min(height, width) < 32 and max(height, width) > 4 * min(height, width):
        height = width = max(height, width)  # padded to a square
    scale = min(1.0, LARGEST / max(height, width))
    height, width = int(height * scale), int(width * scale)
    short, long = sorted((height, width))
    if long <= size:
        if long <= 1.5 * short:
            return 0
        side = short
    else:
        side = min(short, crop_of(size)) if long > 4 * short else crop_of(size)
    rows, columns = (max(1, x // side + (x >= side and x % side > 0.2 * side)) for x in (height, width))
    return rows * columns


def crops_in_grid(height: int, width: int, side: int, most: int) -> int:
    """The number of crops of `side` pixels that a processor makes of an image with these sides: none of one
    that fits into a crop, else those of the grid of 2 to `most` whose form is closest to the image's, and of
    equally close ones the larger one that the image fills by more than half (GOT-OCR 2.0).
    """
    if max(height, width) <= side:
        return 0
    grids = [(w, h) for w, h in itertools.product(range(1, most + 1), repeat=2) if 2 <= w * h <= most]
    best, distance = (1, 1), math.inf
    for w, h in sorted(grids, key=math.prod):
        own = abs(width / height - w / h)
        if own < distance or (own == distance and width * height > 0.5 * side**2 * w * h):
            best, distance = (w, h), own
    return math.prod(best)


WINDOWS = {"image_token_pooling": "pixel_values", "video_token_pooling": "pixel_values_videos"}
"""Keywords that number patches, and those of the patches."""
MOST_CROPS, MARGINS, POOLED = (
    8,
    8,
    2,
)  # of the processor: crops, patches in both margins of one, a token's side


def windowed(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Pictures in windows: see `WindowedPictures`."""
    images = taken(keywords, "pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
    videos = taken(keywords, "pixel_values_videos", "video_token_pooling", "video_grids")
    crops = images.pop("image_num_crops", None)
    if together(images, "pixel_values", "image_token_pooling", "image_grids"):
        if videos:
            raise DataError(
                "got images and videos in one call, whose tokens have the same id: pass them in separate "
                "calls"
            )
        return _pictures(spec, images, crops)
    if crops is not None:
        raise DataError("got image_num_crops without pixel_values: pass all, as the processor does")
    if together(videos, "pixel_values_videos", "video_token_pooling", "video_grids"):
        return _pictures(spec, videos, None)
    return None


def _pictures(spec: VisionSpec, given: Mapping[str, Any], crops: Any) -> Pictures | None:
    assert isinstance(spec.pictures, WindowedPictures)
    (pixels, values), (pooling, windows), (name, grids) = given.items()
    side = spec.pictures.side
    expected = side**2, spec.patches.width
    if values.dim() != 3 or tuple(values.shape[1:]) != expected or not values.is_floating_point():
        raise DataError(
            f"{pixels} must be floating point of shape [crops, {expected[0]}, {expected[1]}]; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    windows, grids = torch.as_tensor(windows).cpu().long(), torch.as_tensor(grids).cpu()
    numbers = 4 if name == "image_grids" else 3
    if grids.dim() != 2 or grids.shape[1] != numbers or grids.is_floating_point() or bool((grids < 0).any()):
        raise DataError(
            f"{name} must be whole numbers [pictures, {numbers}]; found {grids.dtype} of shape "
            f"{tuple(grids.shape)}"
        )
    sizes = grids.prod(1) if numbers == 3 else grids[:, :2].prod(1) + grids[:, 2:].prod(1)
    if windows.dim() != 2 or len(windows) != int(sizes.sum()):
        raise DataError(
            f"{pooling} must be whole numbers [{int(sizes.sum())}, patches of a token], by {name}; found the "
            f"shape {tuple(windows.shape)}"
        )
    total = len(values) * side**2
    if len(windows) and (
        int(windows.min()) < -1 or int(windows.max()) >= total or bool((windows < 0).all(1).any())
    ):
        raise DataError(
            f"{pooling} must number patches from 0 to {total - 1}, or be -1, and name at least one patch for "
            f"each token; found numbers from {int(windows.min())} to {int(windows.max())}"
        )
    if crops is not None:
        counts = torch.as_tensor(crops).flatten().tolist()
        if len(counts) != len(grids) or sum(counts) != len(values):
            raise DataError(
                f"image_num_crops must give the number of crops of each of the {len(grids)} images, "
                f"{len(values)} together; found {counts}"
            )
    if not len(values):
        return None
    patches = channels_first(spec.patches, values.flatten(0, 1))
    return PicturesInWindows(patches, [(1, side, side)] * len(values), windows, sizes.tolist())


def masked(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Images in the upper left corner of squares: see `MaskedPictures`."""
    assert isinstance(spec.pictures, MaskedPictures)
    if spec.pictures.by_row:
        return _masked_rows(spec, merge, keywords)
    given, patch = taken(keywords, "pixel_values", "pixel_mask"), spec.patches.size
    if "pixel_values" not in given:
        together(given, "pixel_values", "pixel_mask")
        return None
    values, mask = given["pixel_values"], given.get("pixel_mask")
    size = values.shape[-1]
    _check("pixel_values", values, (spec.patches.channels, size, size))
    side, tokens = size // patch, dict(spec.pictures.tokens)
    if side**2 not in tokens:
        raise DataError(
            f"pixel_values are {size} pixels per side, {side**2} patches; expected one of the model's "
            f"numbers of patches, {', '.join(map(str, tokens))}"
        )
    grids: list[Grid] = [(1, side, side)] * len(values)
    if mask is not None:
        mask = torch.as_tensor(mask).cpu() != 0
        if tuple(mask.shape) != (len(values), size, size):
            raise DataError(
                f"pixel_mask must be [{len(values)}, {size}, {size}], by pixel_values; found "
                f"{tuple(mask.shape)}"
            )
        cells = _cells(mask, patch)
        grids = _in_the_corner(cells.any(4).any(2), "pixel_mask")
    if not grids:
        return None
    patches = [cut_image(x, grid, merge, patch) for x, grid in zip(values, grids, strict=True)]
    return QueriedPictures(torch.cat(patches), grids, [tokens[side**2]] * len(grids))


def _masked_rows(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """The same by row, with images of zeros that fill up the rows."""
    assert isinstance(spec.pictures, MaskedPictures)
    given, patch = taken(keywords, "pixel_values", "pixel_attention_mask"), spec.patches.size
    if "pixel_values" not in given:
        together(given, "pixel_values", "pixel_attention_mask")
        return None
    values, mask = given["pixel_values"], given.get("pixel_attention_mask")
    shape = tuple(values.shape)
    if len(shape) != 5 or shape[2] != spec.patches.channels or not values.is_floating_point():
        raise DataError(
            f"pixel_values must be floating point of shape [rows, images, {spec.patches.channels}, height, "
            f"width]; found {values.dtype} of shape {shape}"
        )
    if mask is None:
        mask = (values != 0).flatten(2).any(-1).cpu()[..., None, None].expand(*shape[:2], *shape[3:])
    mask = torch.as_tensor(mask).cpu() != 0
    if tuple(mask.shape) != (*shape[:2], *shape[3:]):
        raise DataError(
            f"pixel_attention_mask has the shape {tuple(mask.shape)}; expected {(*shape[:2], *shape[3:])}, "
            "by pixel_values"
        )
    there = mask.flatten(2).any(-1).flatten()
    if not bool(there.any()):
        return None
    grids = _in_the_corner(_cells(mask.flatten(0, 1)[there], patch).all(4).all(2), "pixel_attention_mask")
    images = values.flatten(0, 1)[to_device(there.nonzero()[:, 0], values.device)]
    patches = [cut_image(x, grid, merge, patch) for x, grid in zip(images, grids, strict=True)]
    return QueriedPictures(torch.cat(patches), grids, [spec.pictures.tokens[0][1]] * len(grids))


def _cells(mask: Tensor, patch: int) -> Tensor:
    """[images, height, width] -> the pixels of each whole patch, [images, h, patch, w, patch]."""
    h, w = (size // patch for size in mask.shape[1:])
    return mask[:, : h * patch, : w * patch].unflatten(2, (w, patch)).unflatten(1, (h, patch))


def _in_the_corner(shown: Tensor, name: str) -> list[Grid]:
    """The grids of images whose patches are the shown ones of each, [images, h, w].

    Raises:
        DataError: these are none, or not all in the upper left corner.
    """
    rows, columns = shown.any(2).sum(1), shown.any(1).sum(1)
    down, right = (torch.arange(size, device="cpu") for size in shown.shape[1:])
    corner = (down < rows[:, None])[:, :, None] & (right < columns[:, None])[:, None]
    if not torch.equal(shown, corner) or not bool((rows > 0).all()):
        raise DataError(
            f"{name} must be 1 for an image in the upper left corner, of at least one patch, and 0 elsewhere"
        )
    return [(1, h, w) for h, w in zip(rows.tolist(), columns.tolist(), strict=True)]


def renumbered(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Processor outputs that are to be concatenated, with the numbers of patches that they then have."""
    made = []
    first = dict.fromkeys(WINDOWS, 0)
    for call in calls:
        own = dict(call)
        for name, pixels in WINDOWS.items():
            if name in own:
                windows = torch.as_tensor(own[name])
                own[name] = torch.where(windows < 0, windows, windows + first[name])
                first[name] += math.prod(own[pixels].shape[:2])
        made.append(own)
    return made


def pictures_apart(given: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Processor outputs of several pictures as those of each, numbering patches from 0.

    Args:
        sizes: the number of tokens of each picture.

    Raises:
        DataError: `image_num_crops` is missing.
    """
    if "video_grids" in given:
        counts = torch.as_tensor(given["video_grids"])[:, 0].tolist()
    elif "image_num_crops" in given:
        counts = torch.as_tensor(given["image_num_crops"]).flatten().tolist()
    else:
        raise DataError("got images without image_num_crops: pass all, as the processor does")
    each = dict.fromkeys(WINDOWS, sizes) | dict.fromkeys(WINDOWS.values(), counts)
    ones = [1] * len(sizes)
    pieces = {name: torch.as_tensor(x).split(list(each.get(name, ones))) for name, x in given.items()}
    apart = [dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)]
    begins = itertools.accumulate(counts, initial=0)
    for own, begin in zip(apart, begins, strict=False):
        for name, pixels in WINDOWS.items():
            if name in own:
                first = begin * own[pixels].shape[1]
                own[name] = torch.where(own[name] < 0, own[name], own[name] - first)
    return apart


def crops_and_tokens(height: int, width: int, side: int, patch: int) -> tuple[int, int]:
    """The numbers of crops, the whole image included, and of tokens that the processor makes of an image with
    these sides in pixels, from crops of `side` patches of `patch` pixels.

    Crops overlap by their margins. As many as cover the image without reducing it are taken, the smallest
    enlargement, or of at most `MOST_CROPS` those that reduce it least.
    """
    inner = side - MARGINS
    tilings = [
        (rows, columns)
        for rows, columns in itertools.product(range(1, MOST_CROPS + 1), repeat=2)
        if rows * columns <= MOST_CROPS
    ]
    tilings.sort(key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))
    height, width = height - MARGINS * patch, width - MARGINS * patch

    def scale(tiling: tuple[int, int]) -> float:
        sides = zip(tiling, (height, width), strict=True)
        return min(count * inner * patch / own if own else math.inf for count, own in sides)

    large = [tiling for tiling in tilings if scale(tiling) >= 1]
    rows, columns = min(large, key=scale) if large else max(tilings, key=scale)
    pooled = [-(-(count * inner + MARGINS) // POOLED) for count in (rows, columns)]
    return 1 + rows * columns, math.ceil(side / POOLED) ** 2 + math.prod(pooled)
