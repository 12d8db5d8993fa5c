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
        filled: padding of the features is in the place of these zeros.
    """

    clip: int
    first: int
    columns: int
    width: int
    filled: bool = False

    def cut(self, features: Tensor) -> Tensor:
        """The chunk of features [clips, bins, columns], [bins, width]."""
        columns = self.width if self.filled else self.columns
        own = features[self.clip, :, self.first : self.first + columns]
        return F.pad(own, (0, self.width - own.shape[1])) if self.width > own.shape[1] else own


def chunks_of(spec: AudioSpec, columns: Sequence[int]) -> list[Chunk]:
    """The chunks of clips of so many columns.

    With `channels`, the last chunk of a clip is convolved with zeros up to the length of the others, as in
    the reference, and these zeros do not stay zeros. (There, the only chunk of a short clip gets zeros up to
    the longest chunk of the batch. Here each clip is encoded as if it were alone.)
    """
    assert isinstance(spec.sounds, ChunkedSounds)
    chunk, whole, found = spec.sounds.chunk, spec.sounds.filled, []
    for clip, count in enumerate(columns):
        for first in range(0, count, chunk):
            own = min(chunk, count - first)
            filled = whole or (spec.channels is not None and count > chunk)
            found.append(Chunk(clip, first, own, chunk if filled else own, whole))
    return found
