"""Images as a whole and as crops (Step 3.7): the whole image at one size, and if it is larger or long, parts
of it at a smaller size, whose tokens come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.specs import CroppedPictures, VisionSpec
from liger_models.layers.vision.grid_inputs import taken, together
from liger_models.layers.vision.patch_order import Grid, cut_image
from liger_models.layers.vision.pictures import Pictures

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
    return CroppedImages(torch.cat(patches), grids, [count + 1 for count in counts])


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
