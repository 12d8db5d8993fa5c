"""The encoder of Gemma 3n's images, against timm's, where that package is installed."""

from __future__ import annotations

import copy

import pytest
import torch
from fake_timm import MobileNet
from pairs import BOUND, randomise, relative_distance

ARGUMENTS = {"channel_multiplier": 0.02, "msfa_output_resolution": 2}


def test_the_stand_in_of_the_tests_is_timms_encoder():
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("mobilenetv5_300m_enc", num_classes=0, **ARGUMENTS).double()
    ours = MobileNet(**ARGUMENTS).double()
    randomise(theirs, torch.Generator().manual_seed(1))
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 96, 96, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    made = [model.forward_features(images) for model in (ours, theirs)]
    assert relative_distance(*made) <= BOUND**2  # in float64, whose rounding is 1e-9 times float32's
    for features in made:
        features.square().sum().backward()
    own = dict(ours.named_parameters())
    assert all(relative_distance(own[name].grad, p.grad) <= BOUND**2 for name, p in theirs.named_parameters())


@pytest.mark.parametrize("family", ["gemma3n"])
def test_features_are_the_references_times_the_root_of_their_width(family, pair):
    """Which a norm after them nearly hides."""
    call = pair.batch()
    images = call["pixel_values"].double()
    ours, theirs = (
        copy.deepcopy(encoder).double()
        for encoder in (pair.ours.vision.encoder, pair.reference.model.vision_tower)
    )
    with torch.no_grad():
        (found,) = ours(pair.ours.vision.take({"pixel_values": images}).pictures)
        expected = theirs(images).last_hidden_state.flatten(2).transpose(1, 2).flatten(0, 1)
    assert relative_distance(found, 2048**0.5 * expected) <= BOUND**2
