"""The encoder of spectrograms by a conformer (Gemma 4, after USM, arXiv:2303.01037).

    x = relu(norm(conv(relu(norm(conv(features)))))) @ W_in^T     a quarter of the columns, which are frames
    [F, D] of all clips of a batch, without padding
    blocks of two MLPs, attention to the last frames and a convolution (layers/blocks/encoders/conformer.py)
    x @ W_out^T + b

Convolutions read zeros after the end of a clip. So each clip is encoded as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._copies import to_device
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.audio.frames import Convolution, unpadded
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.blocks import BLOCKS, Block, run_block
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AudioSpec, LayerNormSpec, SubsampledSounds


class ConformerEncoder(nn.Module):
    """Encode sounds for the projector.

    Args:
        spec: the convolutions and the blocks.
        attention: the attention backend, see layers/attention/backends.py.
    """

    def __init__(self, spec: AudioSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        assert isinstance(spec.sounds, SubsampledSounds)
        self.spec = spec
        self.subsampling = Subsampling(spec.bins, spec.sounds, spec.hidden_size)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.out_proj = Linear(spec.hidden_size, spec.features_size, bias=True)

    def forward(self, sounds: Sounds) -> Tensor:
        """Return the projector's input, [F, output_size]."""
        x, residual, offload = self.subsampling(sounds), None, Offload()
        sequences = Sequences.of_lengths(sounds.lengths, x.device)
        sequences.prepare_rotary(())
        for layer in self.layers:
            x, residual = run_block(layer, x, residual, sequences, offload=offload)
        return cast(Tensor, self.out_proj(x))

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on all layers."""
        set_levels(self.layers, levels)


class Subsampling(nn.Module):
    """Make frames of spectrograms.

    Args:
        bins: of the spectrograms.
        sounds: the convolutions.
        hidden_size: the width D of frames.
    """

    def __init__(self, bins: int, sounds: SubsampledSounds, hidden_size: int):
        super().__init__()
        for number, outputs in enumerate(sounds.channels):
            inputs = sounds.channels[number - 1] if number else 1
            self.add_module(f"layer{number}", HalvedColumns(inputs, outputs, sounds.eps))
        self.halvings = len(sounds.channels)
        self.in_proj = Linear(sounds.channels[-1] * -(-bins // 2**self.halvings), hidden_size, bias=False)

    def forward(self, sounds: Sounds) -> Tensor:
        """The frames of all clips without padding, [F, D]."""
        columns = sounds.columns
        x = sounds.features[:, : max(columns), :, None]  # [clips, columns, bins, 1]
        for number in range(self.halvings):
            x = getattr(self, f"layer{number}")(without_padding(x, columns))
            columns = [(n + 1) // 2 for n in columns]
        return cast(Tensor, self.in_proj(unpadded(x.flatten(2), sounds.frames)))


class HalvedColumns(nn.Module):
    """A convolution over three columns and three frequencies with stride 2, a norm over channels, and max(x,
    0).

    Args:
        inputs, outputs: numbers of channels.
        eps: of the norm.
    """

    def __init__(self, inputs: int, outputs: int, eps: float):
        super().__init__()
        self.conv = Convolution(inputs, outputs, stride=2, axes=2, bias=False)
        self.norm = make_norm(outputs, LayerNormSpec(eps, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, columns, frequencies, inputs] -> [clips, columns / 2, frequencies / 2, outputs]."""
        x = self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return F.relu(cast(Tensor, self.norm(x)))


def without_padding(x: Tensor, columns: Sequence[int]) -> Tensor:
    """x [clips, columns, frequencies, channels] with zeros after the `columns` of each clip."""
    if min(columns) == x.shape[1]:
        return x
    place, ends = torch.arange(x.shape[1]), torch.tensor(columns)
    padding = to_device(place >= ends[:, None], x.device)
    return x.masked_fill(padding[:, :, None, None], 0)
