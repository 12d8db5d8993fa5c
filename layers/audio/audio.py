"""The audio part of a language model: an encoder, a projector, and the replacement of audio tokens by
features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.audio.conformer import ConformerEncoder
from liger_models.layers.audio.encoder import AudioEncoder, Pieces
from liger_models.layers.audio.sounds import Sounds, blank_sound, kept_of, take_sounds, tokens_of
from liger_models.layers.audio.time_rotary import numbers_of_clips, turned
from liger_models.layers.parts.embedder import filled_up
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AudioSpec,
    ConformerSounds,
    PaddedSounds,
    TwoWaysSpec,
    WaveformSounds,
)
from liger_models.layers.vision.pictures import replaced
from liger_models.layers.vision.projectors import PROJECTORS
from liger_models.layers.vision.vision import is_of_several


class AudioInputs:
    """Audio inputs of a call: its sounds, if any, and the places of their tokens.

    Attributes:
        is_audio: mask of the audio tokens, [T].
        with_images: mask of the audio tokens whose documents have images, [audio tokens] on the host; None:
            there are none, or the projector does not ask.
        windows: the number of each clip in its recording, [clips] on the device, where the encoder asks.
        checks: the number of audio tokens, on its way to the host.
        wrong: sounds and tokens do not match, a bool on the device.
    """

    def __init__(self, sounds: Sounds | None):
        self.sounds = sounds
        self.is_audio: Tensor | None = None
        self.with_images: Tensor | None = None
        self.windows: Tensor | None = None
        self.checks: HostCopy | None = None
        self.wrong: Tensor | None = None

    @property
    def expected(self) -> int:
        """The number of tokens that the sounds need."""
        return 0 if self.sounds is None else sum(self.sounds.counts())


def make_encoder(spec: AudioSpec, attention: AttentionBackend) -> nn.Module:
    """Create the encoder that the spec describes."""
    if isinstance(spec.sounds, WaveformSounds):
        return Pieces()
    if isinstance(spec.sounds, ConformerSounds):
        return ConformerEncoder(spec, attention)
    return AudioEncoder(spec, attention)


class Audio(nn.Module):
    """An audio encoder and its projection to a language model.

    Args:
        spec: the parts.
        hidden_size: of the language model, H.
        attention: the attention backend.
    """

    def __init__(self, spec: AudioSpec, hidden_size: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.spec = spec
        self.encoder = make_encoder(spec, attention)
        self.projector = PROJECTORS[type(spec.projector)](spec.features_size, hidden_size, spec.projector)
        # Access by name: transformers orders these modules differently.
        self._parts_of_projector = tuple(name for name, _ in self.projector.named_children())

    def forward(
        self, sounds: Sounds, with_images: Tensor | None = None, windows: Tensor | None = None
    ) -> Tensor:
        """Return the features of all clips, [F, H]. A frozen encoder saves nothing for backward.
        `with_images` and `windows` as in `AudioInputs`; by default each clip is a recording.
        """
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.encoder.parameters())
        with torch.set_grad_enabled(trained):
            made = self.encoder(sounds)
        if self.spec.times is not None:
            made = self._turned(made, sounds, windows)
        if isinstance(self.encoder, Pieces):  # no weights of an encoder gave them the model's dtype
            dtype = next(self.projector.parameters()).dtype
            made = made.to(dtype) if dtype.is_floating_point else made  # else: of quantised weights
        if self.spec.tokens is not None:
            lengths = [kept_of(self.spec, n) for n in sounds.frames]
            return filled_up(self.projector, self.projector(made), lengths, self.spec.tokens)
        if not isinstance(self.spec.projector, TwoWaysSpec):
            return self.projector(made)
        return self.projector(made, with_images, is_of_several(self.encoder, *self.ways_out()))

    def _turned(self, x: Tensor, sounds: Sounds, windows: Tensor | None) -> Tensor:
        """The projector's input rotated by the time since the beginning of its recording."""
        assert isinstance(self.spec.sounds, PaddedSounds)
        assert self.spec.times is not None
        counts, most = sounds.counts(), tokens_of(self.spec, self.spec.sounds.frames)
        if windows is None:
            windows = torch.zeros(len(counts), dtype=torch.long, device=x.device)
        return turned(x, windows, counts, most, self.spec.times)

    def ways_out(self) -> list[nn.Module]:
        """The modules between the encoder and the language model."""
        return [self.projector, *(getattr(self.projector, name) for name in self._parts_of_projector)]

    def take(self, keywords: dict[str, Any]) -> AudioInputs:
        """Remove the audio inputs from a call's keywords and return them.

        Raises:
            DataError: missing or incompatible keywords.
        """
        return AudioInputs(take_sounds(self.spec, keywords))

    def prepare(self, inputs: AudioInputs, sequences: Sequences, input_ids: Tensor | None) -> None:
        """Find the audio tokens, and start the check that sounds and tokens match.

        Args:
            input_ids: [batch, seq].

        Raises:
            DataError: sounds without ids.
        """
        if input_ids is None:
            if inputs.sounds is not None:
                raise DataError("sounds need input_ids, which mark their places; found only embeddings")
            return
        inputs.is_audio = sequences.documents.pack(input_ids) == self.spec.audio_id
        found = inputs.is_audio.sum()
        inputs.wrong, inputs.checks = found != inputs.expected, HostCopy(found[None])
        if self.spec.times is not None and inputs.sounds is not None:
            inputs.windows = numbers_of_clips(inputs.is_audio, inputs.sounds.counts(), sequences.documents)
        if self.spec.image_id is not None and inputs.sounds is not None:
            inputs.with_images = self._with_images(inputs, sequences, input_ids)

    def _with_images(self, inputs: AudioInputs, sequences: Sequences, input_ids: Tensor) -> Tensor | None:
        """As in `AudioInputs`. In calls with images and sounds this waits for the device.

        Raises:
            DataError: sounds and tokens do not match.
        """
        documents = sequences.documents
        if not sequences.visibility.with_images:
            return None
        assert inputs.is_audio is not None
        assert self.spec.image_id is not None
        before = F.pad(torch.eq(documents.pack(input_ids), self.spec.image_id).long().cumsum(0), (1, 0))
        bounds, tree = documents.bounds(), documents.tree
        images = before[-1:].expand(documents.num_tokens) if bounds is None else _in(before, bounds)
        if tree is not None:
            images = images + _in(before, tree.continued())
        found = (images > 0)[inputs.is_audio].cpu()
        if len(found) != inputs.expected:
            self.finish(inputs)
        return found

    def place(self, inputs: AudioInputs | None, embeds: Tensor) -> Tensor:
        """Replace the embeddings [T, H] of audio tokens by features."""
        if inputs is None:
            return embeds
        if inputs.sounds is None:
            return self._blank_sounds(embeds)
        assert inputs.is_audio is not None
        number = (inputs.is_audio.cumsum(0) - 1).clamp(0, max(0, inputs.expected - 1))
        features = self(inputs.sounds, inputs.with_images, inputs.windows)
        return replaced(embeds, features, inputs.is_audio[:, None], number) if len(features) else embeds

    def _blank_sounds(self, embeds: Tensor) -> Tensor:
        """Run a blank clip through an encoder shared with other processes, if this one has no sounds: they
        would wait for it otherwise. The embeddings do not change.
        """
        if not is_of_several(self.encoder, *self.ways_out()):
            return embeds
        features = self(blank_sound(self.spec, embeds))
        return embeds + 0 * features.sum().to(embeds.dtype) if features.requires_grad else embeds

    def finish(self, inputs: AudioInputs) -> None:
        """Wait for the check that `prepare` started.

        Raises:
            DataError: sounds and tokens do not match.
        """
        if inputs.checks is None:
            return
        (found,) = inputs.checks.tolist()
        if found != inputs.expected:
            raise DataError(
                f"the text has {found} tokens of sounds ({self.spec.audio_id}), and the sounds make "
                f"{inputs.expected}; was the text cut, a sound left out, or the placeholder of each not "
                "repeated, as the processor does?"
            )


def _in(before: Tensor, ranges: Tensor) -> Tensor:
    """The number of image tokens in the ranges of tokens [2, T], from those before each token, [T + 1]."""
    first, end = before[ranges.long()]
    return end - first
