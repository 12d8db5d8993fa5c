"""The audio encoder: frames of sound, and blocks in which the frames of a clip attend to one another.

    x = gelu(conv2(gelu(conv1(features)))) + positions       (Whisper, arXiv:2212.04356, section 2.2)
    [F, D] of all clips of a batch, without padding
    blocks as in a language model, with bidirectional attention
    means of two frames each, in some families, and a norm

Both convolutions read three columns with zeros around a clip; the second has stride 2. Some families cut
clips into chunks, each with zeros around it, or convolve over frequencies, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.audio.chunks import Chunk, chunks_of
from liger_models.layers.audio.frames import Convolution, FrameTable, unpadded
from liger_models.layers.audio.sounds import Sounds, frames_of
from liger_models.layers.blocks import BLOCKS, Block, add_and_norm, run_block
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.parts.sinusoids import cached_sinusoids
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AudioSpec, ChunkedSounds, PaddedSounds


class AudioEncoder(nn.Module):
    """Encode sounds for the projector.

    Args:
        spec: the frames and the blocks.
        attention: the attention backend, see layers/attention/backends.py.
    """

    def __init__(self, spec: AudioSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec, width = spec, spec.hidden_size
        if spec.channels is None:
            self.conv1 = Convolution(spec.bins, width)
            self.conv2 = Convolution(width, width, stride=2)
        else:
            self.conv1 = Convolution(1, spec.channels, stride=2, axes=2)
            self.conv2, self.conv3 = (Convolution(spec.channels, spec.channels, 2, axes=2) for _ in range(2))
            self.conv_out = Linear(spec.channels * -(-spec.bins // 8), width, bias=False)
        self.ropes = tuple(dict.fromkeys(rope for block in spec.blocks for rope in block.ropes))
        self.table = None
        if isinstance(spec.sounds, PaddedSounds) and not self.ropes:
            self.table = FrameTable(spec.sounds.frames, width)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        assert spec.norm_after is not None
        self.norm_after = make_norm(spec.hidden_size, spec.norm_after)

    def forward(self, sounds: Sounds) -> Tensor:
        """Return the projector's input, [F, D], or with `paired` half as many."""
        x, residual, offload = self.frames(sounds), None, Offload()
        sequences = Sequences.of_lengths(sounds.lengths, x.device)
        sequences.prepare_rotary(self.ropes)
        for layer in self.layers:
            x, residual = run_block(layer, x, residual, sequences, offload=offload)
        if sounds.kept != sounds.frames:
            x = of_clips(x, sounds.frames, sounds.kept)
            residual = None if residual is None else of_clips(residual, sounds.frames, sounds.kept)
        if not self.spec.paired:
            return add_and_norm(self.norm_after, x, residual)[0]
        x = x if residual is None else x + residual
        return cast(Tensor, self.norm_after(means_of_pairs(x, sounds.frames)))

    def frames(self, sounds: Sounds) -> Tensor:
        """The frames of all clips without padding, [F, D]."""
        if isinstance(self.spec.sounds, ChunkedSounds):
            return self._frames_of_chunks(sounds)
        most = max(sounds.frames)  # clips are convolved with their padding
        x = sounds.features[:, :, : 2 * most + 1]  # no frame in use reads later columns
        x = self._convolved(x)[:, :most]
        return unpadded(x if self.table is None else self.table(x), sounds.frames)

    def _frames_of_chunks(self, sounds: Sounds) -> Tensor:
        """The same of clips whose chunks are convolved one by one: together where they are as long."""
        chunks = chunks_of(self.spec, sounds.columns)
        made: dict[Chunk, Tensor] = {}
        for width in dict.fromkeys(chunk.width for chunk in chunks):
            own = [chunk for chunk in chunks if chunk.width == width]
            x = self._convolved(torch.stack([chunk.cut(sounds.features) for chunk in own]))
            x = (x + cached_sinusoids(x.shape[1], x.shape[2], x.device)).to(x.dtype)
            made |= {
                chunk: row[: frames_of(self.spec, chunk.columns)] for chunk, row in zip(own, x, strict=True)
            }
        return torch.cat([made[chunk] for chunk in chunks])

    def _convolved(self, x: Tensor) -> Tensor:
        """x [n, bins, columns] -> [n, frames, D]."""
        if self.spec.channels is None:
            return F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)
        x = x[:, None]
        for convolution in (self.conv1, self.conv2, self.conv3):
            x = F.gelu(convolution(x))  # [n, channels, frequencies, columns]
        return cast(Tensor, self.conv_out(x.permute(0, 3, 1, 2).flatten(2)))

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on all layers."""
        set_levels(self.layers, levels)


class Pieces(nn.Module):
    """Take the pieces of waveforms as frames, in place of an encoder. Has no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList())

    def forward(self, sounds: Sounds) -> Tensor:
        """Return the projector's input, [F, samples]."""
        return unpadded(sounds.features, sounds.frames)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on no layers."""
        set_levels(self.layers, levels)


def of_clips(x: Tensor, lengths: Sequence[int], kept: Sequence[int]) -> Tensor:
    """The first `kept` rows of each clip of x, whose clips have these lengths."""
    return torch.cat([clip[:n] for clip, n in zip(x.split(list(lengths)), kept, strict=True)])


def means_of_pairs(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The means of two rows each of clips of these lengths, without the last row of an odd number: [F, D] ->
    [sum of lengths // 2, D].
    """
    if any(length % 2 for length in lengths):
        clips = zip(x.split(list(lengths)), lengths, strict=True)
        x = torch.cat([clip[: length - length % 2] for clip, length in clips])
    return (x[::2] + x[1::2]) / 2
