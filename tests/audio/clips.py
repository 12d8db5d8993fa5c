"""Conversations with sounds: see liger_models/images/scenes.py."""

from __future__ import annotations

from liger_models.images.sounds import Sound

DOCUMENTS = [[2, Sound(19), 1, Sound(8), 3], [21], [Sound(23), 5]]
"""Clips of odd and even numbers of frames, and text alone."""


def of_sounds(name: str) -> bool:
    """Whether a parameter of transformers' module is the encoder's or the projector's."""
    return "audio" in name or name.removeprefix("base_model.model.").startswith(_OF_GRANITE_SPEECH)


def of_encoder(name: str) -> bool:
    """Whether it is the encoder's."""
    return "audio_tower" in name or "audio_embed.encoder" in name or name.startswith(_OF_GRANITE_SPEECH[0])


_OF_GRANITE_SPEECH = ("model.encoder.", "model.projector.")
