"""What does not fit is said, and nothing that a processor gives is dropped."""

from __future__ import annotations

import pytest
import torch
from scenes import Image, Video

from liger_models.convert.errors import DataError


def without(call, *names):
    return {name: value for name, value in call.items() if name not in names}


CHANGES = {
    "no pixels": (lambda call: without(call, "pixel_values"), "image_grid_thw without pixel_values"),
    "no grids": (lambda call: without(call, "image_grid_thw"), "pixel_values without image_grid_thw"),
    "no kinds": (lambda call: without(call, "mm_token_type_ids"), "without mm_token_type_ids"),
    "neither": (lambda call: without(call, "pixel_values", "image_grid_thw"), "was the text cut"),
    "an image less": (
        lambda call: call | {"pixel_values": call["pixel_values"][:-16], "image_grid_thw": GRIDS[:1]},
        "19 tokens of images",
    ),
    "other pixels": (
        lambda call: call | {"pixel_values": call["pixel_values"][:-1]},
        r"pixel_values must be floating point of shape \[76, 54\]",
    ),
    "an odd grid": (
        lambda call: call | {"image_grid_thw": GRIDS + torch.tensor([0, 1, 0])},
        "multiples of 2",
    ),
    "another grid": (
        lambda call: call | {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 6, 10]])},
        "runs of image tokens",
    ),
    "other kinds": (
        lambda call: call | {"mm_token_type_ids": call["mm_token_type_ids"].roll(1)},
        "mm_token_type_ids must be 1 where",
    ),
    "kinds of another shape": (
        lambda call: call | {"mm_token_type_ids": call["mm_token_type_ids"][:, 1:]},
        "must have the shape of the tokens",
    ),
    "seconds of no video": (lambda call: call | {"second_per_grid_ts": [1.0]}, "1 values for 0 videos"),
    "rounded seconds": (
        lambda call: call | {"second_per_grid_ts": torch.ones(0, dtype=torch.bfloat16)},
        "came as torch.bfloat16",
    ),
}
GRIDS = torch.tensor([[1, 6, 10], [1, 4, 4]])


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_pictures_that_do_not_fit_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("qwen2_5_vl", make_pair("qwen2_5_vl"))
    call = pair.scene([1, Image(6, 10), 2, Image(4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


def test_two_pictures_need_text_between_them(make_pair, pairs_made):
    """As in the reference, which takes the two for one."""
    pair = pairs_made.setdefault("qwen2_5_vl", make_pair("qwen2_5_vl"))
    with pytest.raises(DataError, match="with text between them"):
        pair.ours(**pair.scene([1, Image(4, 4), Image(4, 4), 3]))


def test_a_keyword_that_is_not_known_is_refused(pair):
    with pytest.raises(TypeError, match="aspect_ratio_ids"):
        pair.ours(**pair.scene([1, Image(4, 4), 2], [1, Video(1, 4, 4), 2]), aspect_ratio_ids=torch.ones(1))
