"""Packs conversations of one row each, with their processors' outputs, into one row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.specs import AnyresPictures, StripPictures, TiledVisionSpec
from liger_models.layers.vision.crops import renumbered
from liger_models.layers.vision.positions import IMAGE, VIDEO

# Read on the host: as device tensors, they would cost a synchronisation.
ON_HOST = frozenset(
    {
        *(
            "image_grid_thw",
            "image_grid_hw",
            "video_grid_thw",
            "second_per_grid_ts",
            "video_second_per_grid",
            "image_sizes",
            "batch_num_images",
        ),
        "num_local_patches",
        *("target_sizes", "target_sizes_videos"),
        *("image_position_ids", "video_position_ids", "num_frames_per_video"),
        *("spatial_shapes", "pixel_attention_mask", "pixel_mask", "image_attention_mask"),
        *("image_token_pooling", "image_grids", "image_num_crops", "video_token_pooling", "video_grids"),
        *("image_merge_sizes", "video_merge_sizes", "video_compression_mask"),
        "cross_attention_mask",
    }
)
# Padded with -1.
_PLACES = ("image_position_ids", "video_position_ids", "image_token_pooling", "video_token_pooling")
_SEEN, MARKS = "cross_attention_mask", "mm_token_type_ids"
_VIDEOS, _FRAMES = "pixel_values_videos", "num_frames_per_video"
OF_TOKENS = frozenset({_SEEN, MARKS})
"""Keywords with an entry for each token of a conversation, not for each image."""


class VisionConversation(NamedTuple):
    """A conversation.

    Attributes:
        ids: [T].
        learned: mask of the tokens to learn, [T] bool.
        images: the processor's outputs except for ids and token kinds, unless these mark the tokens that
            attend to one another (`marks_tokens`); empty for text.
    """

    ids: Tensor
    learned: Tensor
    images: dict[str, Tensor]


def pack_conversations(
    spec: Any, conversations: Sequence[VisionConversation], parents: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return the vision keywords of a call on all conversations in one row; empty without images.

    Args:
        spec: a `VisionSpec` or `TiledVisionSpec`.
        parents: the index of the conversation that each continues, or -1, as in a call. With cross-attention,
            a continuation has no images of its own, and its mask refers to the parent's.
    """
    pictured = renumbered([one.images for one in conversations if one.images])
    if not pictured:
        return {}
    tiled = isinstance(spec, TiledVisionSpec)
    call = _frames_apart(spec, [images[_VIDEOS] for images in pictured if _VIDEOS in images])
    for name in sorted({name for images in pictured for name in images} - {*OF_TOKENS, *call}):
        dim = of_patches(spec, name) or int(tiled)
        call[name] = _joined([images[name] for images in pictured if name in images], dim, name)
    if tiled:
        call[_SEEN] = _block_diagonal(spec, conversations, parents or [-1] * len(conversations))
    elif spec.kinds is not None:
        call[spec.kinds] = torch.cat([kinds_of(spec, one) for one in conversations])[None]
    return call


def of_patches(spec: Any, name: str) -> int:
    """The dimension of an output of the processor along which pictures are joined; 0 also if there is another
    for all outputs.
    """
    strips = isinstance(getattr(spec, "pictures", None), StripPictures)
    return 3 if strips and name.startswith("pixel_values") else 0


def marks_tokens(spec: Any) -> bool:
    """Whether token kinds mark more tokens than the pictures' own, so that ids do not tell them."""
    return getattr(spec, "spans", None) == "marked"


def kinds_of(spec: Any, one: VisionConversation) -> Tensor:
    """Token kinds as processors number them, [T]: 1 for images and 2 for videos. In models with a
    bidirectional prefix: 0 in the prefix and 1 from the first learned token on; text has no prefix.

    Raises:
        DataError: pictures without the kinds that ids do not tell.
    """
    if marks_tokens(spec):
        given = one.images.get(MARKS)
        if given is None and one.images:
            raise DataError(f"a conversation has images without {MARKS}: pass them as the processor does")
        kinds = torch.zeros_like(one.ids)  # of an answer, which may follow the given ones
        if given is not None:
            count = min(len(kinds), given.shape[1])
            kinds[:count] = given[0, :count]
        return kinds
    if spec.spans == "prefix":
        return one.learned.long().cummax(0).values if one.images else torch.ones_like(one.ids)
    videos = torch.zeros_like(one.ids) if spec.video_id is None else (one.ids == spec.video_id).long()
    return IMAGE * (one.ids == spec.image_id).long() + VIDEO * videos


def predictable_tokens(spec: Any, ids: Tensor, learned: Tensor, shown: bool) -> Tensor:
    """Mask of the tokens [T] that a model can predict, [T] bool: not image or video tokens, those that frame
    them, nor the bidirectional prefix of a conversation with images (`shown`).
    """
    video_id, unsaid = getattr(spec, "video_id", None), getattr(spec, "unsaid", None)
    said = (ids != spec.image_id) & (ids != (-1 if video_id is None else video_id))
    said = said if unsaid is None else said & (ids < unsaid)
    prefix = shown and getattr(spec, "spans", None) == "prefix"
    return said & learned.cummax(0).values if prefix else said


def part_of(images: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Select the images for a conversation's tokens `start` to `stop`: the part at 0 gets the pixels, every
    part its rows of the cross-attention mask, or its tokens' kinds.
    """
    own = {} if start else images
    return own | {name: images[name][:, start:stop] for name in OF_TOKENS if name in images}


def _frames_apart(spec: Any, videos: Sequence[Tensor]) -> dict[str, Tensor]:
    """Join videos [videos, frames, ...] of different lengths along frames, with the number of frames of each.
    Empty if lengths are equal or the frames are joined anyway.
    """
    if not isinstance(getattr(spec, "pictures", None), AnyresPictures):
        return {}
    lengths = [len(video) for one in videos for video in one]
    if len(set(lengths)) < 2:
        return {}
    return {_VIDEOS: torch.cat([one.flatten(0, 1) for one in videos]), _FRAMES: torch.tensor(lengths)}


def _joined(tensors: list[Tensor], dim: int, name: str) -> Tensor:
    """Concatenate, padding the other dimensions to the largest size."""
    sizes = [max(sizes) for sizes in zip(*(x.shape for x in tensors), strict=True)]
    fill = -1 if name in _PLACES else 0
    filled = []
    for x in tensors:
        missing = [0 if d == dim else size - x.shape[d] for d, size in enumerate(sizes)]
        pads = [number for size in reversed(missing) for number in (0, size)]
        filled.append(F.pad(x, pads, value=fill) if any(missing) else x)
    return torch.cat(filled, dim)


def _block_diagonal(
    spec: TiledVisionSpec, conversations: Sequence[VisionConversation], parents: Sequence[int]
) -> Tensor:
    """Cross-attention mask, [1, T, images, tiles]: tokens see the tiles of their own conversation."""
    own = [
        one.images[_SEEN][0, : len(one.ids)] if one.images else torch.zeros(len(one.ids), 0, spec.tiles)
        for one in conversations
    ]
    begins = [0, *itertools.accumulate(x.shape[1] * (p < 0) for x, p in zip(own, parents, strict=True))]
    seen = torch.zeros(1, sum(map(len, own)), begins[-1], spec.tiles, dtype=torch.long)
    token = 0
    for number, (x, parent) in enumerate(zip(own, parents, strict=True)):
        image = begins[number if parent < 0 else parent]
        seen[0, token : token + len(x), image : image + x.shape[1]] = x
        token += len(x)
    return seen
