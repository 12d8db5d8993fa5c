"""Conversations of one row each, with what their processors give, as one packed row of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.layers.spec import TiledVisionSpec
from liger_models.layers.vision.positions import IMAGE, VIDEO

# What is read on the host: to hand it over on a device would cost a synchronisation.
ON_HOST = frozenset(
    {
        *("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes", "batch_num_images"),
        *("image_position_ids", "video_position_ids", "num_frames_per_video"),
        "cross_attention_mask",
    }
)
_PLACES = ("image_position_ids", "video_position_ids")  # -1 where there is nothing
_SEEN = "cross_attention_mask"


class Seen(NamedTuple):
    """A conversation.

    Attributes:
        ids: [T].
        learned: which of them are to be learned, [T] bool.
        images: what the processor gives beside ids and kinds of tokens; none: text alone.
    """

    ids: Tensor
    learned: Tensor
    images: dict[str, Tensor]


def pack_seen(spec: Any, conversations: Sequence[Seen]) -> dict[str, Tensor]:
    """The keywords of a call on all of them, end to end in one row: none where there is no image.

    Args:
        spec: a `VisionSpec` or `TiledVisionSpec`.
    """
    pictured = [one.images for one in conversations if one.images]
    if not pictured:
        return {}
    tiled = isinstance(spec, TiledVisionSpec)
    names = sorted({name for images in pictured for name in images} - {_SEEN})
    call = {
        name: _joined([images[name] for images in pictured if name in images], int(tiled), name)
        for name in names
    }
    if tiled:
        call[_SEEN] = _block_diagonal(spec, conversations)
    elif spec.kinds is not None:
        call[spec.kinds] = torch.cat([kinds_of(spec, one) for one in conversations])[None]
    return call


def kinds_of(spec: Any, one: Seen) -> Tensor:
    """What processors say of each token, [T]: 1 of those of images and 2 of videos; or, where the beginning
    of a document is seen as a whole, 0 there and 1 from the first token on that is learned. Text alone has no
    such beginning.
    """
    if spec.spans == "prefix":
        return one.learned.long().cummax(0).values if one.images else torch.ones_like(one.ids)
    videos = torch.zeros_like(one.ids) if spec.video_id is None else (one.ids == spec.video_id).long()
    return IMAGE * (one.ids == spec.image_id).long() + VIDEO * videos


def _joined(tensors: list[Tensor], dim: int, name: str) -> Tensor:
    """Behind one another, filled up to the largest in all other dimensions."""
    sizes = [max(sizes) for sizes in zip(*(x.shape for x in tensors), strict=True)]
    fill = -1 if name in _PLACES else 0
    filled = []
    for x in tensors:
        missing = [0 if d == dim else size - x.shape[d] for d, size in enumerate(sizes)]
        pads = [number for size in reversed(missing) for number in (0, size)]
        filled.append(F.pad(x, pads, value=fill) if any(missing) else x)
    return torch.cat(filled, dim)


def _block_diagonal(spec: TiledVisionSpec, conversations: Sequence[Seen]) -> Tensor:
    """Which tiles each token sees, [1, T, images, tiles]: those of its own conversation."""
    own = [
        one.images[_SEEN][0, : len(one.ids)] if one.images else torch.zeros(len(one.ids), 0, spec.tiles)
        for one in conversations
    ]
    tokens, images = sum(len(x) for x in own), sum(x.shape[1] for x in own)
    seen = torch.zeros(1, tokens, images, spec.tiles, dtype=torch.long)
    token = image = 0
    for x in own:
        seen[0, token : token + len(x), image : image + x.shape[1]] = x
        token, image = token + len(x), image + x.shape[1]
    return seen
