"""Conversations with sounds: see liger_models/images/scenes.py."""

from __future__ import annotations

from liger_models.images.sounds import Sound

DOCUMENTS = [[2, Sound(19), 1, Sound(8), 3], [21], [Sound(23), 5]]
"""Clips of odd and even numbers of frames, and text alone."""
