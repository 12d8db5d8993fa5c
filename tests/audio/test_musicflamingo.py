"""Music Flamingo: features turned by the time since the beginning of their recording, of several clips."""

from __future__ import annotations

import pytest
import torch
from pairs import beyond_bound, relative_distance

from liger_models.convert.errors import ConfigError
from liger_models.images.sounds import Sound
from liger_models.layers.audio.sounds import Sounds
from liger_models.layers.audio.time_rotary import numbers_of_clips
from liger_models.layers.sequences.sequences import Sequences

WHOLE = Sound(24)  # a clip without padding
LONG = [[2, WHOLE, WHOLE, Sound(9), 1, Sound(11), 3], [4], [WHOLE, WHOLE, 2]]


@pytest.fixture
def family() -> str:
    return "musicflamingo"


@pytest.mark.parametrize("padding", ["right", "left"])
def test_recordings_of_several_clips_match_the_reference(padding, pair):
    call = pair.scene(*LONG, padding=padding)
    found, expected = pair.run_ours(**call), pair.run_reference(**call)
    assert not beyond_bound(found.distances(expected, call["attention_mask"].bool()))


def test_packed_recordings_equal_separate_ones(pair):
    """Also where one document ends with a sound, and the next begins with one."""
    documents = [[3, WHOLE, Sound(9)], [WHOLE, WHOLE, 2], [5]]
    alone = [pair.scene(document) for document in documents]
    with torch.no_grad():
        expected = torch.cat([pair.ours(**call, return_logits=True).logits[0] for call in alone])
        bounds = torch.tensor([0, *(call["input_ids"].shape[1] for call in alone)]).cumsum(0)
        found = pair.ours(**pair.pack(alone), cu_seqlens=bounds, return_logits=True).logits[0]
    assert relative_distance(found, expected) <= 1e-6


def test_clips_are_numbered_in_their_recordings():
    counts, text = [6, 6, 2, 3, 6, 6, 1], [2, 0, 0, 1, 2, 0, 0]
    tokens = [step for n, t in zip(counts, text, strict=True) for step in [False] * t + [True] * n] + [False]
    is_audio = torch.tensor(tokens)
    one = Sequences.of_lengths([len(tokens)], torch.device("cpu")).documents
    assert numbers_of_clips(is_audio, counts, one).tolist() == [0, 1, 2, 0, 0, 1, 2]
    two = Sequences.of_lengths([2 + 6, len(tokens) - 8], torch.device("cpu")).documents
    assert numbers_of_clips(is_audio, counts, two).tolist() == [0, 0, 1, 0, 0, 1, 2]


def test_the_number_of_a_clip_changes_its_features(pair):
    features = torch.randn(2, pair.ours.spec.audio.bins, 24)
    sounds = Sounds(pair.ours.spec.audio, features, [24, 24])
    with torch.no_grad():
        apart = pair.ours.audio(sounds)
        together = pair.ours.audio(sounds, windows=torch.tensor([0, 1]))
    assert relative_distance(together[:6], apart[:6]) == 0.0
    assert relative_distance(together[6:], apart[6:]) > 1e-3


def test_features_alone_are_those_of_transformers(pair, hf, both):
    theirs, ours = (model.eval() for model in both)
    call = pair.scene(*LONG)
    given = {name: call[name] for name in ("input_features", "input_features_mask", "input_ids")}
    with torch.no_grad():
        found, expected = (model.get_audio_features(**given).pooler_output for model in (ours, theirs))
    assert relative_distance(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": 5.0}, "at least the 6 tokens of a clip"),
        ({"rope_type": "linear", "factor": 2.0}, "must be of the type default"),
        ({"partial_rotary_factor": 0.75}, "at most half of the encoder's 32 dimensions, found 24"),
    ],
)
def test_a_rotation_that_the_reference_cannot_compute_is_refused(rope, message, pair):
    import liger_models

    settings = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25} | rope
    with pytest.raises(ConfigError, match=message):
        liger_models.from_config({**pair.config, "rope_parameters": settings})
