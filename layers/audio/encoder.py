"""The audio encoder: frames of sound, and blocks in which the frames of a clip attend to one another.

    x = gelu(conv2(gelu(conv1(features)))) + positions       (Whisper, arXiv:2212.04356, section 2.2)
    [F, D] of all clips of a batch, without padding
    blocks as in a language model, with bidirectional attention
    means of two frames each, in some families, and a norm

Both convolutions read three columns with zeros around a clip; the second has stride 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.audio.frames import Convolution, FrameTable, unpadded
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.blocks import BLOCKS, Block, add_and_norm, run_block
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AudioSpec


class AudioEncoder(nn.Module):
    """Encode sounds for the projector.

    Args:
        spec: the frames and the blocks.
        attention: the attention backend, see layers/attention/backends.py.
    """

    def __init__(self, spec: AudioSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec = spec
        self.conv1 = Convolution(spec.bins, spec.hidden_size)
        self.conv2 = Convolution(spec.hidden_size, spec.hidden_size, stride=2)
        self.table = FrameTable(spec.sounds.frames, spec.hidden_size)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.norm_after = make_norm(spec.hidden_size, spec.norm_after)

    def forward(self, sounds: Sounds) -> Tensor:
        """Return the projector's input, [F, D], or with `paired` half as many."""
        x, residual, offload = self.frames(sounds), None, Offload()
        sequences = Sequences.of_lengths(sounds.frames, x.device)
        sequences.prepare_rotary(())
        for layer in self.layers:
            x, residual = run_block(layer, x, residual, sequences, offload=offload)
        if not self.spec.paired:
            return add_and_norm(self.norm_after, x, residual)[0]
        x = x if residual is None else x + residual
        return cast(Tensor, self.norm_after(means_of_pairs(x, sounds.frames)))

    def frames(self, sounds: Sounds) -> Tensor:
        """The frames of all clips without padding, [F, D]. Clips are convolved with their padding."""
        most = max(sounds.frames)
        x = sounds.features[:, :, : 2 * most + 1]  # no frame in use reads later columns
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)[:, :most]
        return unpadded(self.table(x), sounds.frames)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on all layers."""
        set_levels(self.layers, levels)


def means_of_pairs(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The means of two rows each of clips of these lengths, without the last row of an odd number: [F, D] ->
    [sum of lengths // 2, D].
    """
    if any(length % 2 for length in lengths):
        clips = zip(x.split(list(lengths)), lengths, strict=True)
        x = torch.cat([clip[: length - length % 2] for clip, length in clips])
    return (x[::2] + x[1::2]) / 2
