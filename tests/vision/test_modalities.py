"""Experts of text and others of pictures (ERNIE 4.5 VL): which tokens go where, and calls that do not fit."""

from __future__ import annotations

import pytest
import torch
from pairs import beyond_bound
from scenes import Image, Video

from liger_models.convert.errors import DataError
from liger_models.layers.experts.expert_parallel import divide_experts
from liger_models.layers.sequences.modality import Modality

FRAMED = "moe_mm_token_type_ids"


@pytest.fixture
def family() -> str:
    return "ernie4_5_vl_moe"


def test_tokens_that_frame_a_picture_go_to_its_experts_without_the_picture_too(pair):
    """No processor's output is needed for that."""
    ids = pair.scene([9])["input_ids"]
    ids[0, 2:4] = torch.tensor(pair.vision.framing_ids[:2])
    ids[0, 6] = pair.vision.framing_ids[3]
    kinds = torch.isin(ids, torch.tensor(pair.vision.framing_ids)).int()
    found = pair.run_ours(input_ids=ids, labels=ids, near_ties=True)
    expected = pair.run_reference(input_ids=ids, labels=ids, **{FRAMED: kinds})
    assert not beyond_bound(found.distances(expected))
    assert any("vision_moe" in name for name in found.gradients)


def test_tokens_of_modalities_are_told_apart_and_joined_again():
    modality = Modality.of(torch.tensor([0, 1, 1, 0, 1]).bool())
    x = torch.randn(5, 2, requires_grad=True)
    text, pictures = modality.apart(x)
    assert torch.equal(text, x[[0, 3]])
    assert torch.equal(pictures, x[[1, 2, 4]])
    assert torch.equal(modality.joined(text, pictures), x)
    modality.joined(2 * text, 3 * pictures).sum().backward()
    assert x.grad[:, 0].tolist() == [2, 3, 3, 2, 3]
    assert Modality.of(torch.zeros(3).bool()) is None


WRONG = {
    "kinds without the frames": (lambda call: call | {FRAMED: call["mm_token_type_ids"]}, FRAMED),
    "kinds of another shape": (lambda call: call | {FRAMED: call[FRAMED][:, 1:]}, "shape of the tokens"),
    "an odd number of steps": (
        lambda call: call | {"video_grid_thw": torch.tensor([[1, 8, 4]])},
        r"video_grid_thw\[0\] has 1 time steps, two of which",
    ),
    "an image of steps": (
        lambda call: call | {"image_grid_thw": torch.tensor([[2, 2, 4]])},
        r"image_grid_thw\[0\] has 2 time steps",
    ),
    "experts of another pass": (lambda call: call | {"output_routed_experts": True}, "routed_experts"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_calls_that_do_not_fit_are_refused(change, message, pair):
    call = pair.scene([1, Image(4, 4), 2, Video(2, 4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


def test_ranks_cannot_share_the_experts(pair):
    with pytest.raises(ValueError, match="experts of text and of images"):
        divide_experts(pair.ours, None)
