"""Clips, whose time steps attend to one another and share their tokens: Kimi K2.5.

transformers' whole model takes clips of one time step alone: it splits their features as if each step had its
own. Its encoder and its projector take longer ones, of equal length in a call.
"""

from __future__ import annotations

import pytest
import torch
from pairs import BOUND, relative_distance
from scenes import Image, Video

from liger_models.convert.errors import DataError


@pytest.fixture
def family():
    return "kimi_k25"


def clips(pair, *videos):
    return pair.scenes._grids(list(videos))


def test_features_and_gradients_of_clips_equal_the_references_encoder(pair):
    call = clips(pair, Video(3, 4, 6), Video(3, 2, 8))
    features, weights = pair.ours.vision(pair.ours.vision.take(dict(call)).pictures)[0], None
    reference = pair.reference.model
    made = reference.vision_tower(call["pixel_values_videos"], grid_thw=call["video_grid_thw"])
    expected = reference.mm_projector(made.pooler_output).squeeze(1)
    assert features.shape == expected.shape == (6 + 4, pair.hidden_size)
    assert relative_distance(features, expected) <= BOUND
    weights = torch.randn_like(expected)
    for model, result in ((pair.ours, features), (pair.reference, expected)):
        model.zero_grad()
        (result * weights).sum().backward()
    found = pair.gradients_of_ours()
    wanted = {name: p.grad for name, p in pair.reference.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = wanted[name.replace(".bias", ".weight")].norm() if "k_proj.bias" in name else gradient.norm()
        assert (found[name] - gradient).norm() <= BOUND * scale, name


def test_clips_of_several_lengths_equal_each_alone(pair):
    several = (Video(3, 4, 6), Video(1, 2, 2), Video(2, 2, 8))
    torch.manual_seed(1)
    call = clips(pair, *several)
    call |= clips(pair, Image(4, 4))
    vision = pair.ours.vision
    together = vision(vision.take(dict(call)).pictures)[0]
    pixels = call["pixel_values_videos"].split([72, 4, 32])
    alone = [vision(vision.take({k: v for k, v in call.items() if "video" not in k}).pictures)[0]]
    for own, grid in zip(pixels, call["video_grid_thw"], strict=True):
        given = {"pixel_values_videos": own, "video_grid_thw": grid[None]}
        alone.append(vision(vision.take(given).pictures)[0])
    assert [len(x) for x in alone] == [4, 6, 1, 4]
    assert relative_distance(together, torch.cat(alone)) <= BOUND


def test_a_text_with_a_clip_has_the_tokens_of_one_step(pair):
    call = pair.scenes.make([[2, Video(3, 4, 4), 5]])
    assert int((call["input_ids"] == pair.vision.video_id).sum()) == 4
    assert pair.ours(**call).loss.isfinite()


def test_a_clip_longer_than_the_models_positions_is_refused(pair):
    call = pair.scenes.make([[2, Video(4, 4, 4), 5]])
    with pytest.raises(DataError, match=r"video_grid_thw\[0\] has 4 time steps; the model has .* for 3"):
        pair.ours(**call)
