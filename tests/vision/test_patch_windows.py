"""Pictures of whose patches the processor names those that make each token (Molmo 2)."""

from __future__ import annotations

import pytest
import torch
from pairs import beyond_bound
from scenes import Image

from liger_models.convert.errors import DataError
from liger_models.layers.vision.crops import crops_and_tokens
from liger_models.layers.vision.packing import VisionConversation, pack_conversations, predictable_tokens
from liger_models.layers.vision.repeated import repeat_pictures

SHOWN = [2, Image(16, 4), 3, Image(4, 4), 2]  # 3 crops and 1, and the whole of each
TOKENS = ("input_ids", "labels", "mm_token_type_ids")


@pytest.fixture
def pair(make_pair, pairs_made):
    return pairs_made.setdefault("molmo2", make_pair("molmo2"))


PLANS = [  # height, width, and what the processor of the released models makes of them
    *((378, 378, 2, 392), (300, 200, 2, 392), (600, 400, 5, 725), (1080, 1920, 9, 1162)),
    *((3000, 500, 9, 1316), (2000, 2000, 5, 725), (100, 2500, 2, 392), (4000, 3000, 7, 955)),
]


@pytest.mark.parametrize(("height", "width", "crops", "tokens"), PLANS)
def test_crops_and_tokens_are_those_of_the_processor(height, width, crops, tokens):
    assert crops_and_tokens(height, width, side=27, patch=14) == (crops, tokens)


def test_videos_match_the_reference(pair):
    """Nine patches make a token; each frame is a picture, and text is between frames."""
    images = pair.scenes.make_even([[3, Image(8, 4), 4, Image(8, 4), 2]])  # 2 crops and a whole each
    windows = torch.arange(6 * 25).view(6, 25)[:, torch.tensor([0, 1, 2, 5, 6, 7, 10, 11, 24])]
    windows[2, 7:] = -1
    frame, one = 131, pair.vision.image_id
    ids = torch.tensor([[10, frame, one, one, 12, frame, one, 13, frame, one, one, 14, frame, one, 15, 16]])
    call = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= frame, -100),
        "mm_token_type_ids": (ids >= frame).long(),
        "pixel_values_videos": images["pixel_values"],
        "video_token_pooling": windows,
        "video_grids": torch.tensor([[6, 1, 1]]),
    }
    assert not beyond_bound(pair.run_ours(**call).distances(pair.run_reference(**call)))


def test_each_row_gets_its_own_pictures_for_several_answers(pair):
    call = pair.scenes.make([SHOWN, [1, Image(8, 4), 4]])
    given = {name: x for name, x in call.items() if name not in (*TOKENS, "attention_mask")}
    twice = repeat_pictures(pair.vision, given, call["input_ids"], 2)
    ids = call["input_ids"].repeat_interleave(2, 0)
    kinds = call["mm_token_type_ids"].repeat_interleave(2, 0)
    with torch.no_grad():
        alone = pair.ours(call["input_ids"], mm_token_type_ids=call["mm_token_type_ids"], **given).logits
        found = pair.ours(ids, mm_token_type_ids=kinds, **twice).logits
    torch.testing.assert_close(found, alone.repeat_interleave(2, 0), rtol=1e-4, atol=1e-5)
    del given["image_num_crops"]
    with pytest.raises(DataError, match="without image_num_crops"):
        repeat_pictures(pair.vision, given, call["input_ids"], 2)


def test_tokens_that_frame_images_are_not_learned(pair):
    ids = pair.scenes.make([SHOWN])["input_ids"][0]
    said = predictable_tokens(pair.vision, ids, torch.ones_like(ids).bool(), shown=True)
    assert torch.equal(said, ids < pair.vocab_size)
    assert (~said).sum() > (ids == pair.vision.image_id).sum()


def test_conversations_with_images_need_the_kinds_of_their_tokens(pair):
    call = pair.scenes.make([SHOWN])
    images = {name: x for name, x in call.items() if name not in TOKENS}
    one = VisionConversation(call["input_ids"][0], call["labels"][0] != -100, images)
    with pytest.raises(DataError, match="images without mm_token_type_ids"):
        pack_conversations(pair.vision, [one])


def changed(call, name, change):
    return {**call, name: change(call[name])}


WRONG = {
    "no windows": (
        lambda c: changed(c, "image_token_pooling", lambda _: None),
        "without image_token_pooling",
    ),
    "too few": (
        lambda c: changed(c, "image_token_pooling", lambda x: x[1:]),
        r"whole numbers \[\d+, patches",
    ),
    "beyond": (lambda c: changed(c, "image_token_pooling", lambda x: x + 9), r"from 0 to \d+, or be -1"),
    "nothing": (lambda c: changed(c, "image_token_pooling", lambda x: 0 * x - 1), "at least one patch"),
    "grids": (lambda c: changed(c, "image_grids", lambda x: x[:, :3]), r"whole numbers \[pictures, 4\]"),
    "crops": (lambda c: changed(c, "image_num_crops", lambda x: x + 1), "number of crops of each of the 2"),
    "pixels": (lambda c: changed(c, "pixel_values", lambda x: x[:, 1:]), r"\[crops, 25, 27\]"),
    "videos": (lambda c: {**c, "pixel_values_videos": c["pixel_values"]}, "images and videos in one call"),
    "kinds": (lambda c: changed(c, "mm_token_type_ids", lambda x: 0 * x), "mm_token_type_ids must be 1 for"),
    "text": (lambda c: {name: c[name] for name in TOKENS}, "and 0 everywhere without images|0 and 0"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_pictures_that_do_not_fit_are_refused(change, message, pair):
    call = {name: x for name, x in change(pair.scenes.make([SHOWN])).items() if x is not None}
    with pytest.raises(DataError, match=message):
        pair.ours(**call)
