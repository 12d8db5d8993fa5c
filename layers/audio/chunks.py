"""Chunks of clips, which an encoder convolves one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from liger_models.layers.specs import AudioSpec, ChunkedSounds


class Chunk(NamedTuple):
    """Columns of a clip.

    Attributes:
        clip: the number of the clip.
        first, columns: the first column, and how many there are.
        width: the same with the zeros after them.
    """

    clip: int
    first: int
    columns: int
    width: int

    def cut(self, features: Tensor) -> Tensor:
        """The chunk of features [clips, bins, columns], [bins, width]."""
        own = features[self.clip, :, self.first : self.first + self.columns]
        return F.pad(own, (0, self.width - self.columns)) if self.width > self.columns else own


def chunks_of(spec: AudioSpec, columns: Sequence[int]) -> list[Chunk]:
    """The chunks of clips of so many columns.

    With `channels`, the last chunk of a clip is convolved with zeros up to the length of the others, as in
    the reference, and these zeros do not stay zeros. (There, the only chunk of a short clip gets zeros up to
    the longest chunk of the batch. Here each clip is encoded as if it were alone.)
    """
    assert isinstance(spec.sounds, ChunkedSounds)
    chunk, found = spec.sounds.chunk, []
    for clip, count in enumerate(columns):
        for first in range(0, count, chunk):
            own = min(chunk, count - first)
            filled = spec.channels is not None and count > chunk
            found.append(Chunk(clip, first, own, chunk if filled else own))
    return found
