"""Images given by row of the batch, with images of zeros that fill up the rows (Idefics 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError


def images_of_rows(values: Tensor, mask: Any) -> Tensor:
    """The images of all rows, [images, channels, height, width], without those that fill up a row.

    Args:
        values: [rows, images, channels, height, width].
        mask: [rows, images, height, width], 0 for images that fill up a row. Without it these are the images
            of zeros, which synchronises the device.

    Raises:
        DataError: another shape, or an image that is hidden in part.
    """
    if values.dim() != 5:
        raise DataError(
            "pixel_values must be of shape [rows, images, channels, size, size], as the processor returns "
            f"them; found {tuple(values.shape)}"
        )
    if mask is None:
        there = (values != 0).flatten(2).any(-1).flatten()
    else:
        mask = torch.as_tensor(mask).cpu() != 0  # read on the host
        if mask.shape != (*values.shape[:2], *values.shape[3:]):
            raise DataError(
                f"pixel_attention_mask has the shape {tuple(mask.shape)}; expected "
                f"{(*values.shape[:2], *values.shape[3:])}, by pixel_values"
            )
        mask = mask.flatten(2).flatten(0, 1)
        there = mask.any(-1)
        if not bool(mask[there].all()):
            raise DataError(
                "pixel_attention_mask hides a part of an image; expected whole images, as the processor "
                "makes them from tiles or by resizing to squares"
            )
    return values.flatten(0, 1)[there.to(values.device, non_blocking=True)]
