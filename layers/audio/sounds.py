"""The clips of a batch, as spectrograms, made from the outputs of a processor.

A column of a spectrogram is 10 ms in all supported families. A convolution with stride 2 makes (n + 1) // 2
columns of n. Those that the last convolution makes are frames. Where clips are waveforms, a column is a piece
of one, and a frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.specs import (
    AudioSpec,
    ChunkedSounds,
    ConformerSounds,
    CountedSounds,
    DepthwiseSounds,
    FrameQueriesSpec,
    PaddedSounds,
    StackedSounds,
    WaveformSounds,
)
from liger_models.layers.vision.grid_inputs import taken, together
from liger_models.layers.vision.repeated import order_of

KEYWORDS = (
    *(ChunkedSounds.features, ChunkedSounds.mask, WaveformSounds.mask),
    *(CountedSounds.features, CountedSounds.sizes, CountedSounds.mask),
)
"""Outputs of processors for sounds."""


class Sounds:
    """The clips of a batch.

    Attributes:
        features: [clips, bins, columns], padded; with `columns_first` [clips, columns, bins].
        columns: the number of columns of each clip without padding.
        frames: the number of frames of each clip, with those of padding where these are encoded, too.
        kept: the number of the first frames of each clip that make tokens.
        filling: the number of frames of zeros after those of each clip.
        unseen: the number of frames of padding at the end of each clip that other frames do not see.
        lengths: the numbers of frames that attend to one another, in order, with those of zeros.
    """

    def __init__(self, spec: AudioSpec, features: Tensor, columns: Sequence[int]):
        self.spec, self.features, self.columns = spec, features, list(columns)
        self.frames = [frames_of(spec, n) for n in self.columns]
        self.lengths, self.filling = self.frames, [0] * len(self.frames)
        self.unseen = [0] * len(self.frames)
        self.kept = self.frames
        if isinstance(spec.sounds, StackedSounds):  # padding is encoded, too
            most = features.shape[1] if features.dim() == 3 else max(columns)
            self.lengths = self.frames = [most] * len(self.columns)
        elif isinstance(spec.sounds, PaddedSounds) and spec.sounds.attended:
            each = spec.projector.merge**2
            self.kept = [tokens_of(spec, n) * each for n in self.frames]
            self.lengths = self.frames = [spec.sounds.frames] * len(self.columns)
        if isinstance(spec.sounds, DepthwiseSounds):
            self.unseen = [n - _halved(spec, own) for n, own in zip(self.frames, self.columns, strict=True)]
        if isinstance(spec.sounds, CountedSounds):
            most = spec.sounds.piece
            self.filling = [-n % most if n > most else 0 for n in self.frames]
            self.lengths = [min(n, most) for n in self.frames for _ in range(0, n, most)]
        if isinstance(spec.sounds, ChunkedSounds):
            most = spec.sounds.window * frames_of(spec, spec.sounds.chunk)
            self.lengths = [min(most, n - first) for n in self.frames for first in range(0, n, most)]

    def counts(self) -> list[int]:
        """The number of tokens of each clip."""
        return [tokens_of(self.spec, n) for n in self.kept]


def frames_of(spec: AudioSpec, columns: int) -> int:
    """The number of frames of a clip."""
    if isinstance(spec.sounds, ChunkedSounds) and columns > spec.sounds.chunk:
        whole, rest = divmod(columns, spec.sounds.chunk)
        return whole * frames_of(spec, spec.sounds.chunk) + frames_of(spec, rest)
    if isinstance(spec.sounds, WaveformSounds):
        return columns
    return _halved(spec, columns + 1 if isinstance(spec.sounds, DepthwiseSounds) else columns)


def _halved(spec: AudioSpec, columns: int) -> int:
    """The number of frames that the convolutions make."""
    if isinstance(spec.sounds, ConformerSounds):
        halvings = len(spec.sounds.channels)
    else:
        halvings = 1 if spec.channels is None else 3
    for _ in range(halvings):
        columns = (columns + 1) // 2
    return columns


def tokens_of(spec: AudioSpec, frames: int) -> int:
    """The number of tokens of a clip of so many frames."""
    if spec.tokens is not None:
        return spec.tokens
    if isinstance(spec.projector, FrameQueriesSpec):
        return -(-frames // spec.projector.window) * spec.projector.queries
    return (frames // 2 if spec.paired else frames) // spec.projector.merge**2


def kept_of(spec: AudioSpec, frames: int) -> int:
    """The number of a clip's frames that the projector reads."""
    return -(-frames // spec.reduction)


def take_sounds(spec: AudioSpec, keywords: dict[str, Any]) -> Sounds | None:
    """Remove the sound keywords from a call's keywords and return them as sounds; None if there are none.

    Raises:
        DataError: missing keywords, or incompatible shapes, dtypes or counts.
    """
    masked, mask, name = spec.sounds.masked, spec.sounds.mask, spec.sounds.features
    names = (name, mask) if masked else (name,)
    counted = isinstance(spec.sounds, CountedSounds)
    given = taken(keywords, *names, *([CountedSounds.sizes] if counted else []))
    if not together(given, *((name, CountedSounds.sizes, *given) if counted else names)):
        return None
    features = given[name]
    shape: list[Any] = ["clips", spec.bins, "columns"]
    if isinstance(spec.sounds, PaddedSounds):
        shape[2] = 2 * spec.sounds.frames
    elif spec.sounds.columns_first:
        shape[1:] = "pieces" if isinstance(spec.sounds, WaveformSounds) else "columns", spec.bins
    known = all(isinstance(n, str) or n == own for n, own in zip(shape, features.shape, strict=False))
    if features.dim() != 3 or not known or not features.is_floating_point():
        raise DataError(
            f"{name} must be floating point of shape [{', '.join(map(str, shape))}], as "
            f"the model's processor returns them; found {features.dtype} of shape {tuple(features.shape)}"
        )
    if not len(features):
        return None
    clips, most = len(features), features.shape[1 if spec.sounds.columns_first else 2]
    columns = [most] * clips
    if mask in given:
        if isinstance(spec.sounds, ChunkedSounds) and spec.sounds.filled and most % spec.sounds.chunk:
            raise DataError(
                f"{name} has {most} columns; expected a multiple of {spec.sounds.chunk}, as the model's "
                "processor pads them"
            )
        columns = _columns(spec, torch.as_tensor(given[mask]), clips, most)
        if isinstance(spec.sounds, DepthwiseSounds):
            _check_room(spec, columns, most)
    sounds = Sounds(spec, features, columns)
    if spec.tokens is not None and (made := max(kept_of(spec, n) for n in sounds.frames)) > spec.tokens:
        raise DataError(
            f"a clip has {max(columns)} columns and makes {made} features; {spec.audio_id} stands "
            f"{spec.tokens} times for each clip: cut the clip, as the model's processor does"
        )
    if counted:
        sizes = torch.as_tensor(given[CountedSounds.sizes]).flatten().tolist()
        if sizes != sounds.counts():
            missing = "" if mask in given else f" without {mask}"
            raise DataError(
                f"{CountedSounds.sizes} is {sizes}, and {name}{missing} makes {sounds.counts()} tokens; "
                "pass all outputs of the processor"
            )
    return sounds


def _columns(spec: AudioSpec, mask: Tensor, clips: int, most: int) -> list[int]:
    """The number of columns of each clip without padding. Reads the mask on the host."""
    name = spec.sounds.mask
    known = tokens_of(spec, most) if isinstance(spec.sounds, StackedSounds) else most
    if tuple(mask.shape) != (clips, known):
        raise DataError(
            f"{name} must be {[clips, known]}, by {spec.sounds.features}; found {list(mask.shape)}"
        )
    mask = mask.cpu() != 0
    columns = mask.sum(1).tolist()
    if not torch.equal(mask, torch.arange(mask.shape[1], device="cpu") < mask.sum(1, keepdim=True)):
        raise DataError(f"{name} must be ones and then zeros in every row, since padding follows the sound")
    if short := [i for i, n in enumerate(columns) if n < 1]:
        raise DataError(f"{name}[{short[0]}] has no ones: the clip is empty; leave it out")
    return _of_windows(spec, columns, most) if isinstance(spec.sounds, StackedSounds) else columns


def _of_windows(spec: AudioSpec, tokens: Sequence[int], most: int) -> list[int]:
    """The number of columns of the windows with so many tokens, up to `most`."""
    assert isinstance(spec.projector, FrameQueriesSpec)
    window, queries = spec.projector.window, spec.projector.queries
    if bad := [i for i, n in enumerate(tokens) if n % queries]:
        raise DataError(
            f"{spec.sounds.mask}[{bad[0]}] shows {tokens[bad[0]]} tokens; expected a multiple of {queries}, "
            f"the tokens of {window} columns, as the model's processor counts them"
        )
    return [min(n // queries * window, most) for n in tokens]


def _check_room(spec: AudioSpec, columns: Sequence[int], most: int) -> None:
    """Refuse clips whose frame of padding has no column."""
    short = [i for i, n in enumerate(columns) if frames_of(spec, n) > _halved(spec, most)]
    if short:
        raise DataError(
            f"{spec.sounds.mask}[{short[0]}] shows all {most} columns; expected one column of padding at the "
            "end of each row, as the model's processor leaves it"
        )


def repeat_sounds(spec: AudioSpec, given: Mapping[str, Any], input_ids: Tensor, times: int) -> dict[str, Any]:
    """A processor's outputs for sounds of rows each repeated `times` in place: row 0, row 0, ...

    Args:
        spec: of the encoder.
        given: the outputs, for the rows of `input_ids` [batch, seq].

    Raises:
        DataError: the sounds do not match the tokens.
    """
    sounds = take_sounds(spec, dict(given))
    if sounds is None:
        return dict(given)
    order = order_of((input_ids == spec.audio_id).sum(1).tolist(), sounds.counts(), times)
    return {name: torch.as_tensor(x)[order] for name, x in given.items()}


def blank_sound(spec: AudioSpec, like: Tensor) -> Sounds:
    """A valid clip of zeros that makes a token, with the dtype and device of a tensor."""
    if spec.sounds.columns_first:
        return Sounds(spec, like.new_zeros(1, 1, spec.bins), [1])
    least = 4 * spec.projector.merge**2
    most = 2 * spec.sounds.frames if isinstance(spec.sounds, PaddedSounds) else least
    columns = min(least, most) if spec.sounds.masked else most
    return Sounds(spec, like.new_zeros(1, spec.bins, most), [columns])
