"""Random sounds in the form of processor outputs: part of scenes.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.layers.audio.sounds import frames_of, tokens_of
from liger_models.layers.specs import (
    AudioSpec,
    ChunkedSounds,
    ConformerSounds,
    CountedSounds,
    DepthwiseSounds,
    PaddedSounds,
    StackedSounds,
    WaveformSounds,
)

WORD = 14  # a text token in every family


@dataclass(frozen=True)
class Sound:
    """A sound, with its number of columns of a spectrogram."""

    columns: int


def tokens_of_sound(spec: AudioSpec | None, sound: Sound) -> list[int]:
    """Placeholder tokens of a sound."""
    assert spec is not None
    return [spec.audio_id] * tokens_of(spec, frames_of(spec, _columns(spec, sound)))


def framed_sound(spec: AudioSpec | None, sound: Sound, config: Mapping[str, Any]) -> list[int]:
    """The same with a token before and one after them, where the reference counts positions by these."""
    first, tokens = config.get("audio_start_token_id"), tokens_of_sound(spec, sound)
    return tokens if first is None else [first, *tokens, WORD]


def heard(spec: AudioSpec | None, sounds: Sequence[Sound], normal: Callable[..., Tensor]) -> dict[str, Any]:
    """Processor outputs for these sounds, with noise in their padding, too, unless the reference reads it.
    `normal` draws numbers.
    """
    if spec is None or not sounds:
        return {}
    columns = torch.tensor([_columns(spec, sound) for sound in sounds])
    if isinstance(spec.sounds, WaveformSounds):
        most = max(8, int(columns.max()))
        shape = (most, spec.bins)
    elif isinstance(spec.sounds, ConformerSounds):
        most = max(64, int(columns.max()))
        shape = (most, spec.bins)
    else:
        most = (
            2 * spec.sounds.frames
            if isinstance(spec.sounds, PaddedSounds)
            else max(32 * _factor(spec.sounds), int(columns.max()))
        )
        if isinstance(spec.sounds, ChunkedSounds) and spec.sounds.filled:
            most += -most % spec.sounds.chunk
        shape = (spec.bins, most)
    call = {spec.sounds.features: 0.3 * normal(len(sounds), *shape)}
    if isinstance(spec.sounds, CountedSounds):
        call[spec.sounds.sizes] = torch.tensor([tokens_of(spec, frames_of(spec, int(n))) for n in columns])
    if not spec.sounds.masked:
        return call
    if isinstance(spec.sounds, StackedSounds):  # a mask of tokens
        most, columns = (
            tokens_of(spec, most),
            torch.tensor([tokens_of(spec, int(n)) for n in columns]),
        )
    mask = torch.arange(most) < columns[:, None]
    if isinstance(spec.sounds, DepthwiseSounds):
        call[spec.sounds.features] *= mask[..., None]
    return {**call, spec.sounds.mask: mask if spec.sounds.columns_first else mask.long()}


def _columns(spec: AudioSpec, sound: Sound) -> int:
    """The number of columns of a sound, at most those of a clip; or of a clip, if padding is not masked; or
    many times as many, if chunks are long; or the number of its pieces of 40 ms; or twice as many, if four
    columns make a token; or an odd number, whose last frame is none of padding.
    """
    if isinstance(spec.sounds, ChunkedSounds):
        return sound.columns * _factor(spec.sounds)
    if isinstance(spec.sounds, WaveformSounds):
        return -(-sound.columns // 4)  # pieces of 40 ms
    if isinstance(spec.sounds, ConformerSounds):
        return 2 * sound.columns + isinstance(spec.sounds, DepthwiseSounds)
    most = 2 * spec.sounds.frames
    return min(sound.columns, most) if spec.sounds.masked else most


def _factor(sounds: ChunkedSounds) -> int:
    """Factor of the columns of sounds, so that these have several chunks."""
    return max(1, sounds.chunk // 8)
