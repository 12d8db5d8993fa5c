"""Images given as a whole and as crops (Step 3.7)."""

from __future__ import annotations

import pytest
import torch
from pairs import beyond_bound
from scenes import Image

from liger_models.convert.errors import DataError
from liger_models.layers.vision.crops import crops_of
from liger_models.layers.vision.repeated import repeat_pictures

WITH_CROPS = [2, Image(16, 4), 3, Image(4, 4), 2, Image(8, 4), 1]  # 2, 0 and 1 crops


PLANS = [  # height, width, and the crops that Step 3.7's processor makes, with wholes of 728 pixels
    *((700, 700, 0), (700, 300, 3), (9, 31, 4), (9, 50, 0), (728, 728, 0), (729, 728, 4), (1100, 1100, 4)),
    *((200, 2600, 13), (504, 2600, 5), (606, 2015, 8), (5000, 3000, 24)),
]


@pytest.mark.parametrize(("height", "width", "crops"), PLANS)
def test_the_number_of_crops_is_that_of_the_processor(height, width, crops):
    assert crops_of(height, width, 728) == crops


def test_each_row_gets_its_own_crops_for_several_answers(make_pair, pairs_made):
    pair = pairs_made.setdefault("step3p7", make_pair("step3p7"))
    call = pair.scenes.make([WITH_CROPS, [1, Image(8, 4), 4]])
    given = {name: call[name] for name in ("pixel_values", "pixel_values_local", "num_local_patches")}
    twice = repeat_pictures(pair.vision, given, call["input_ids"], 2)
    assert twice["num_local_patches"].tolist() == [2, 0, 1, 2, 0, 1, 1, 1]
    order = [0, 1, 2, 0, 1, 2, 3, 3]
    assert torch.equal(twice["pixel_values_local"], given["pixel_values_local"][order])


WRONG = {
    "too few counts": ({"num_local_patches": torch.tensor([2, 1])}, r"each of the 3 images, 3 .*\[2, 1\]"),
    "another number": ({"num_local_patches": torch.tensor([2, 1, 1])}, r"3 in pixel_values_local together"),
    "no crops": ({"pixel_values_local": None}, r"0 in pixel_values_local together; found \[2, 0, 1\]"),
    "parts of tokens": ({"pixel_values_local": torch.randn(3, 3, 18, 24)}, r"\(18, 24\) pixels, 6 times 8"),
    "crops alone": ({"pixel_values": None}, "without pixel_values"),
    "another size": ({"pixel_values": torch.randn(3, 3, 27, 24)}, r"\[pictures, 3, 24, 24\]; found"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_crops_that_do_not_fit_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("step3p7", make_pair("step3p7"))
    call = {name: x for name, x in {**pair.scenes.make([WITH_CROPS]), **change}.items() if x is not None}
    with pytest.raises(DataError, match=message):
        pair.ours(**call)


MASKS = {
    "a hole": (lambda mask: mask.index_fill(2, torch.arange(3, 6), 0), "in the upper left corner"),
    "nothing": (lambda mask: 0 * mask, "in the upper left corner"),
    "another size": (lambda mask: mask[:, 1:], r"must be \[2, 18, 18\], by pixel_values"),
}


@pytest.mark.parametrize(("change", "message"), MASKS.values(), ids=MASKS)
def test_masks_that_show_no_image_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("aria", make_pair("aria"))
    call = pair.scenes.make([[2, Image(6, 4), 3, Image(3, 5), 2]])
    with pytest.raises(DataError, match=message):
        pair.ours(**call | {"pixel_mask": change(call["pixel_mask"])})


def test_squares_of_another_size_have_tokens_of_their_own(make_pair, pairs_made):
    """Without a mask all patches are seen."""
    pair = pairs_made.setdefault("aria", make_pair("aria"))
    ids = torch.tensor([[11, 3, 3, 3, 12, 13, 14]])
    call = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 3, -100),
        "pixel_values": torch.randn(1, 3, 12, 12),
    }
    mask = torch.ones(1, 12, 12).long()
    expected = pair.run_reference(**call, pixel_mask=mask)
    assert not beyond_bound(pair.run_ours(**call).distances(expected))
    with pytest.raises(DataError, match=r"15 pixels per side, 25 patches; expected .* 16, 36"):
        pair.ours(**call | {"pixel_values": torch.randn(1, 3, 15, 15)})
