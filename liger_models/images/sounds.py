"""Random sounds in the form of processor outputs: part of scenes.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.layers.audio.sounds import FEATURES, MASK, frames_of, tokens_of
from liger_models.layers.specs import AudioSpec


@dataclass(frozen=True)
class Sound:
    """A sound, with its number of columns of a spectrogram."""

    columns: int


def tokens_of_sound(spec: AudioSpec | None, sound: Sound) -> list[int]:
    """Placeholder tokens of a sound."""
    assert spec is not None
    return [spec.audio_id] * tokens_of(spec, frames_of(_columns(spec, sound)))


def heard(spec: AudioSpec | None, sounds: Sequence[Sound], normal: Callable[..., Tensor]) -> dict[str, Any]:
    """Processor outputs for these sounds, with noise in their padding, too. `normal` draws numbers."""
    if spec is None or not sounds:
        return {}
    columns = torch.tensor([_columns(spec, sound) for sound in sounds])
    most = 2 * spec.sounds.frames
    call = {FEATURES: 0.3 * normal(len(sounds), spec.bins, most)}
    if not spec.sounds.masked:
        return call
    return {**call, MASK: (torch.arange(most) < columns[:, None]).long()}


def _columns(spec: AudioSpec, sound: Sound) -> int:
    """The number of columns of a sound, at most those of a clip; or of a clip, if padding is not masked."""
    most = 2 * spec.sounds.frames
    return min(sound.columns, most) if spec.sounds.masked else most
