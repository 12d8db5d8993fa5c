"""Conversations with sounds: see liger_models/images/scenes.py."""

from __future__ import annotations

from scenes import Image

from liger_models.images.sounds import Sound

DOCUMENTS = [[2, Sound(19), 1, Sound(8), 3], [21], [Sound(23), 5]]
"""Clips of odd and even numbers of frames, of one chunk and of several; and text alone."""


def sounds_of(pair):
    """The documents, with an image in one of them where the family has images."""
    if pair.vision is None:
        return DOCUMENTS
    return [[*DOCUMENTS[0], Image(4, 6), 2], *DOCUMENTS[1:]]
