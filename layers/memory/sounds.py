"""Sizes of a batch's sounds, and memory kept for them outside of the encoder's layers."""

from __future__ import annotations

import math
from typing import Any

import torch

from liger_models.layers.audio.chunks import chunks_of
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.memory.measured import measured
from liger_models.layers.memory.pictures import NOTHING, Edges, Shown
from liger_models.layers.specs import (
    AudioSpec,
    ChunkedSounds,
    ConformerSounds,
    FrameQueriesSpec,
    PaddedSounds,
    StackedSounds,
    SubsampledSounds,
    WaveformSounds,
)
from liger_models.layers.vision.projectors import PROJECTORS

COLUMNS = 100  # of a spectrogram, a second
SAMPLES = 16_000  # of a waveform, a second


def heard_by(spec: AudioSpec | None, sounds: Sounds | None) -> Shown:
    """Sizes of a call's sounds, if any; features count where they are stored."""
    if spec is None or sounds is None:
        return NOTHING
    if isinstance(spec.sounds, ChunkedSounds):
        columns = sum(chunk.width for chunk in chunks_of(spec, sounds.columns))
    elif isinstance(spec.sounds, WaveformSounds):
        columns = 0
    elif isinstance(spec.sounds, ConformerSounds):
        read = sounds.frames if isinstance(spec.sounds, StackedSounds) else sounds.columns
        columns = len(sounds.columns) * max(read)
    else:
        columns = len(sounds.columns) * 2 * max(sounds.frames)  # the convolutions read the padding, too
    return Shown(sum(sounds.lengths), max(sounds.lengths), 0, columns, sum(sounds.counts()))


def heard_of_length(spec: AudioSpec, sounds: int, seconds: float, rows: int = 1) -> Shown:
    """Sizes of `sounds` sounds per row of so many seconds. Where pieces have one length, longer ones are
    several.
    """
    if not sounds:
        return NOTHING
    rate = SAMPLES / spec.bins if isinstance(spec.sounds, WaveformSounds) else COLUMNS
    rate = COLUMNS / 2 if isinstance(spec.sounds, StackedSounds) else rate
    columns, count = max(1, math.ceil(seconds * rate)), rows * sounds
    most = 2 * spec.sounds.frames if isinstance(spec.sounds, PaddedSounds) else columns
    whole, rest = divmod(columns, most)
    clips = [most] * whole + ([rest] if rest else [])
    clips = clips if spec.sounds.masked else [most] * len(clips)
    nothing = torch.empty(0, device="meta")
    shown = heard_by(spec, Sounds(spec, nothing, clips * count))
    numbers = spec.bins * count * most * len(clips)
    return Shown(shown.tokens, shown.longest, 0, shown.patches, shown.features, pixels=4 * numbers)


def edges_of_sounds(
    spec: AudioSpec, shown: Shown, hidden_size: int, dtype: torch.dtype, trained: tuple[bool, bool]
) -> Edges:
    """Memory kept for sounds outside of the encoder's layers: as `edges_of`."""
    if not any(trained):
        return Edges()
    width, size = spec.hidden_size, dtype.itemsize
    if isinstance(spec.sounds, SubsampledSounds):
        kept = shown.patches * spec.bins * size
        for k, channels in enumerate(spec.sounds.channels, 1):
            outputs = (shown.patches >> k) * -(-spec.bins >> k)
            # Of each convolution the output, statistics of its norm, max(x, 0), and that without padding.
            kept += outputs * (3 * channels * size + 8)
        kept += shown.tokens * width * size  # the output projection's input
    elif isinstance(spec.sounds, ConformerSounds):
        kept = 2 * shown.patches * spec.bins * size
        for k, channels in enumerate(spec.sounds.channels, 1):
            outputs = (shown.patches >> k) * -(-spec.bins >> k)
            # Outputs of the convolution, of the linear layer and of its activation, and that without padding.
            kept += outputs * 4 * channels * size
    elif spec.channels is None:
        # The columns, the first convolution's output and its activation, and the second's output.
        kept = shown.patches * (spec.bins + 2 * width) * size + shown.patches // 2 * width * size
    else:  # the columns, and the output of each convolution and its activation
        outputs = sum((shown.patches >> k) * -(-spec.bins >> k) for k in (1, 2, 3)) * spec.channels
        kept = (shown.patches * spec.bins + 2 * outputs) * size
    normed = shown.tokens // 2 if spec.paired else shown.tokens
    if isinstance(spec.sounds, PaddedSounds) and spec.sounds.attended:
        normed = shown.features * spec.projector.merge**2
    kept += 0 if spec.norm_after is None else normed * (width * size + 8)
    with torch.device("meta"):
        way: Any = PROJECTORS[type(spec.projector)](spec.features_size, hidden_size, spec.projector).to(dtype)
    if spec.times is not None:  # what is turned, and cosines and sines, in float32
        kept += normed * spec.times.dim * 4 * 6
    if spec.characters is not None:  # the middle layer's output, and the softmax of its scores, twice
        kept += shown.tokens * (width * size + spec.characters * (size + 4))
    rows = normed // spec.projector.merge**2 * spec.projector.merge**2
    if isinstance(spec.projector, FrameQueriesSpec):
        rows = shown.features // spec.projector.queries * spec.projector.window
    made = measured(way, rows, spec.features_size, dtype, trained[0])
    return Edges(trained[0] * kept, made.saved, backward=made.backward)
