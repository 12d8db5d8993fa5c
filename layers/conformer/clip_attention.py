"""Attention of all frames of a clip to one another, clip by clip: the scores of one clip exist at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from liger_models.layers.sequences.sequences import Sequences


def lengths_of(sequences: Sequences) -> list[int]:
    """The number of frames of each clip."""
    return [end - start for start, end in pairwise(sequences.documents.host_boundaries())]


def attend_by_clip(
    qkv: Tensor, lengths: Sequence[int], head_dim: int, scores: Callable[[Tensor, Tensor, int], Tensor]
) -> Tensor:
    """Attend within each clip, in float32 or wider.

    Args:
        qkv: queries, keys and values, [F, 3 N d].
        lengths: of the clips, whose sum is F.
        head_dim: d.
        scores: gives the scores [N, n, n] of a clip of n frames, from its queries and keys [N, n, d] and its
            first frame.

    Returns:
        [F, N d].
    """
    dtype, made, first = torch.promote_types(qkv.dtype, torch.float32), [], 0
    for clip in qkv.split(list(lengths)):
        parts = (part.to(dtype).unflatten(1, (-1, head_dim)) for part in clip.chunk(3, dim=1))
        q, k, v = (part.transpose(0, 1) for part in parts)  # [N, n, d]
        made.append((scores(q, k, first).softmax(-1) @ v).transpose(0, 1).flatten(1))
        first += len(clip)
    return torch.cat(made)


def by_key(x: Tensor) -> Tensor:
    """By distance, from n - 1 to 1 - n, [N, n, 2 n - 1] -> by key, [N, n, n]: row i begins at n - 1 - i."""
    frames = x.shape[1]
    if frames == 1:
        return x
    width = 2 * frames - 2  # from the first column of a row's keys to that of the next row's
    rows = x.flatten(1)[:, frames - 1 : frames - 1 + frames * width]
    return rows.unflatten(1, (frames, width))[..., :frames]
