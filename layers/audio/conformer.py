"""The encoder of spectrograms by a conformer: Gemma 3n and Gemma 4 (after USM, arXiv:2303.01037),
Phi-4-multimodal (arXiv:2503.01743, section 2.1.2), Parakeet (after FastConformer, arXiv:2305.05084).

    x = relu(norm(conv(relu(norm(conv(features)))))) @ W_in^T     a quarter of the columns, which are frames
    or depthwise convolutions, and linear layers over channels
    [F, D] of all clips of a batch, without padding
    blocks of two MLPs, attention and a convolution (layers/blocks/encoders/conformer.py)
    x @ W_out^T + b, in some families, or every fourth frame

or one linear layer (Granite Speech, arXiv:2505.08699), whose middle layer's scores of characters are added

Convolutions read zeros after the end of a clip. So each clip is encoded as if it were alone. Those of Gemma
3n read the padding that the processor made, in up to two frames at the end, as in the reference. Granite
Speech encodes all padding, as in the reference: its processor does not say where a clip ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._copies import to_device
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.audio.frames import Convolution, CumulativeNorm, StoredMoments, unpadded
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.blocks import BLOCKS, Block, run_block
from liger_models.layers.conformer.distance_attention import DistanceTable
from liger_models.layers.conformer.pointwise import PointwiseConvolution
from liger_models.layers.conformer.rows import with_rows_after, without_rows_after
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AudioSpec,
    ConformerSounds,
    CountedSounds,
    DistanceAttentionSpec,
    FrameQueriesSpec,
    LayerNormSpec,
    StackedSounds,
    SubsampledSounds,
)


class ConformerEncoder(nn.Module):
    """Encode sounds for the projector.

    Args:
        spec: the convolutions and the blocks.
        attention: the attention backend, see layers/attention/backends.py.
    """

    def __init__(self, spec: AudioSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        assert isinstance(spec.sounds, ConformerSounds)
        self.spec = spec
        self.subsampling = Subsampling(spec.bins, spec.sounds, spec.hidden_size)
        layers = [
            BLOCKS[block.topology](spec.hidden_size, block, i, attention)
            for i, block in enumerate(spec.blocks)
        ]
        self.layers: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.distances = self.out_proj = None
        if spec.distances is not None:
            mixers = [b.mixer for b in spec.blocks if isinstance(b.mixer, DistanceAttentionSpec)]
            self.distances = DistanceTable(2 * spec.distances, mixers[0].num_attention_heads)
        self.out = self.out_mid = None
        if spec.characters is not None:
            self.out = Linear(spec.hidden_size, spec.characters, bias=True)
            self.out_mid = Linear(spec.characters, spec.hidden_size, bias=True)
        if spec.output_size is not None:
            self.out_proj = Linear(spec.hidden_size, spec.output_size, bias=True)

    def forward(self, sounds: Sounds) -> Tensor:
        """Return the projector's input, [F, output_size] or as wide as the layers; with a `reduction` fewer
        rows.
        """
        x, residual, offload = self.subsampling(sounds), None, Offload()
        x = with_rows_after(x, sounds.frames, sounds.filling)
        sequences = Sequences.of_lengths(sounds.lengths, x.device)
        sequences.unseen = unseen_frames(sounds, x.device)
        sequences.prepare_rotary(())
        read = () if self.distances is None else (self.distances(),)
        states = {0: x} if 0 in self.spec.states else {}
        for number, layer in enumerate(self.layers, 1):
            x, residual = run_block(layer, x, residual, sequences, *read, offload=offload)
            if number == len(self.layers) // 2 and self.out is not None and self.out_mid is not None:
                x = x + self.out_mid(at_least_float32(self.out(x)).softmax(-1).to(x.dtype))
            if number in self.spec.states:
                states[number] = x
        if states:
            x = torch.cat([*(states[number] for number in self.spec.states), x], dim=1)
        if isinstance(self.spec.projector, FrameQueriesSpec):
            return in_whole_windows(x, sounds, self.spec.projector.window)
        x = without_rows_after(x, sounds.frames, sounds.filling)
        if self.spec.reduction > 1:
            x = torch.cat([clip[:: self.spec.reduction] for clip in x.split(sounds.frames)])
        return x if self.out_proj is None else cast(Tensor, self.out_proj(x))

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

    def __init__(self, bins: int, sounds: ConformerSounds, hidden_size: int):
        super().__init__()
        self.channels_first = not isinstance(sounds, SubsampledSounds)  # in the input of the last layer
        self.scale = getattr(sounds, "scale", 1.0)
        self.moments = StoredMoments(bins) if isinstance(sounds, CountedSounds) else None
        for number, outputs in enumerate(sounds.channels):
            inputs = sounds.channels[number - 1] if number else 1
            if isinstance(sounds, SubsampledSounds):
                halved: nn.Module = HalvedColumns(inputs, outputs, sounds.eps, sounds.cumulative)
            else:
                assert not isinstance(sounds, StackedSounds)  # these have no channels
                halved = HalvedColumnsSeparable(inputs, outputs, sounds.activation, first=not number)
            self.add_module(f"layer{number}", halved)
        self.halvings = len(sounds.channels)
        self.reads_padding = isinstance(sounds, StackedSounds) or getattr(sounds, "cumulative", False)
        width = sounds.channels[-1] * -(-bins // 2**self.halvings) if sounds.channels else bins
        self.in_proj = Linear(width, hidden_size, bias=self.channels_first)

    def forward(self, sounds: Sounds) -> Tensor:
        """The frames of all clips without padding, [F, D]."""
        columns = sounds.columns
        x = sounds.features if self.reads_padding else sounds.features[:, : max(columns)]
        x = (x if self.moments is None else self.moments(x))[..., None]  # [clips, columns, bins, 1]
        for number in range(self.halvings):
            x = x if self.reads_padding else without_padding(x, columns)
            x = getattr(self, f"layer{number}")(x)
            columns = [(n + 1) // 2 for n in columns]
        x = x.transpose(2, 3) if self.channels_first else x
        if any(sounds.unseen):  # frames of padding are zeros
            x = F.pad(without_padding(x, columns), (0, 0, 0, 0, 0, 1))
        x = cast(Tensor, self.in_proj(unpadded(x.flatten(2), sounds.frames)))
        return x if self.scale == 1.0 else x * self.scale


class HalvedColumns(nn.Module):
    """A convolution over three columns and three frequencies with stride 2, a norm over channels, or a
    `cumulative` one, and max(x, 0).

    Args:
        inputs, outputs: numbers of channels.
        eps: of the norm.
        cumulative: over channels, frequencies and the columns so far; windows begin with their column.
    """

    def __init__(self, inputs: int, outputs: int, eps: float, cumulative: bool = False):
        super().__init__()
        self.conv = Convolution(inputs, outputs, stride=2, axes=2, bias=False, ahead=cumulative)
        self.norm: nn.Module
        if cumulative:
            self.norm = CumulativeNorm(outputs, eps)
        else:
            self.norm = make_norm(outputs, LayerNormSpec(eps, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, columns, frequencies, inputs] -> [clips, columns / 2, frequencies / 2, outputs]."""
        x = self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return F.relu(cast(Tensor, self.norm(x)))


class HalvedColumnsSeparable(nn.Module):
    """A convolution over three columns and three frequencies with stride 2 and an activation; after the
    `first`, a depthwise separable one: a linear layer over channels precedes the activation.

    Args:
        inputs, outputs: numbers of channels.
        activation: its name.
        first: whether its input is the spectrogram.
    """

    def __init__(self, inputs: int, outputs: int, activation: str, first: bool):
        super().__init__()
        self.activation = plain_activation(activation)
        self.conv = Convolution(inputs, outputs if first else inputs, stride=2, axes=2, depthwise=not first)
        self.pointwise = None if first else PointwiseConvolution(inputs, outputs, axes=2)

    def forward(self, x: Tensor) -> Tensor:
        """x [clips, columns, frequencies, inputs] -> [clips, columns / 2, frequencies / 2, outputs]."""
        x = self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.activation(x if self.pointwise is None else self.pointwise(x))


def in_whole_windows(x: Tensor, sounds: Sounds, window: int) -> Tensor:
    """The frames of each clip's windows, of x [frames of all clips, D] -> [windows * window, D], with zeros
    after the last frame.
    """
    clips = zip(x.split(sounds.frames), sounds.kept, strict=True)
    return torch.cat([F.pad(clip[:n], (0, 0, 0, -n % window)) for clip, n in clips])


def unseen_frames(sounds: Sounds, device: torch.device) -> Tensor | None:
    """Mask of the frames of padding that others do not see, [F]; None if there are none."""
    if not any(sounds.unseen):
        return None
    ends = torch.tensor(sounds.frames).cumsum(0)[torch.tensor(sounds.unseen) > 0] - 1
    return to_device(torch.zeros(sum(sounds.frames), dtype=torch.bool).index_fill(0, ends, True), device)


def without_padding(x: Tensor, columns: Sequence[int]) -> Tensor:
    """x [clips, columns, frequencies, channels] with zeros after the `columns` of each clip."""
    if min(columns) == x.shape[1]:
        return x
    place, ends = torch.arange(x.shape[1]), torch.tensor(columns)
    padding = to_device(place >= ends[:, None], x.device)
    return x.masked_fill(padding[:, :, None, None], 0)
