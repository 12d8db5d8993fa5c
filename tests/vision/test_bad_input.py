"""Inconsistent inputs raise errors, and no output of a processor is dropped."""

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
def test_mismatched_pictures_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("qwen2_5_vl", make_pair("qwen2_5_vl"))
    call = pair.scene([1, Image(6, 10), 2, Image(4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


SIDES = {
    "no merge sizes": (
        lambda call: without(call, "video_merge_sizes"),
        r"video_merge_sizes .*; found \[\] for",
    ),
    "merge sizes that do not divide": (
        lambda call: call | {"video_merge_sizes": torch.tensor([3])},
        r"video_merge_sizes must be a whole number .*; found \[3\] for the grids \[\(2, 4, 6\)\]",
    ),
    "merge sizes of other tokens": (
        lambda call: call | {"image_merge_sizes": torch.tensor([2])},
        "24 tokens of images and 10 of videos, and the pixels make 6 and 10",
    ),
    "a mask of other tokens": (
        lambda call: call | {"video_compression_mask": torch.ones(13, dtype=torch.bool)},
        r"video_compression_mask must be bool \[12\], .*; found torch.bool of shape \(13,\)",
    ),
    "a mask that keeps all": (
        lambda call: without(call, "video_compression_mask"),
        "24 tokens of images and 10 of videos, and the pixels make 24 and 12",
    ),
}


@pytest.mark.parametrize(("change", "message"), SIDES.values(), ids=SIDES)
def test_pictures_pooled_otherwise_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("video_llama_3", make_pair("video_llama_3"))
    call = pair.scene([1, Image(6, 4), 2, Video(2, 4, 6), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


OF_PADDED = {
    "no sizes": (lambda call: without(call, "image_sizes"), "pixel_values without image_sizes"),
    "no pixels": (lambda call: without(call, "pixel_values"), "image_sizes without pixel_values"),
    "neither": (lambda call: without(call, "pixel_values", "image_sizes"), "was the text cut"),
    "a row of an image less": (
        lambda call: call | {"image_sizes": call["image_sizes"] - torch.tensor([[6, 0], [0, 0]])},
        "19 tokens of images and 0 of videos, and the pixels make 14 and 0",
    ),
    "an image too small": (
        lambda call: call | {"image_sizes": torch.tensor([[22, 33], [5, 15]])},
        r"image_sizes\[1\] is \(5, 15\); expected at least 6 pixels",
    ),
    "an image larger than its pixels": (
        lambda call: call | {"pixel_values": call["pixel_values"][..., :32]},
        r"image_sizes\[0\] is \(22, 33\); expected .* at most the \(54, 32\)",
    ),
    "sizes of other images": (
        lambda call: call | {"image_sizes": call["image_sizes"][:1]},
        r"image_sizes must be integers \[2, 2\]",
    ),
    "grey pixels": (
        lambda call: call | {"pixel_values": call["pixel_values"][:, :1]},
        r"shape \[images, 3, height, width\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), OF_PADDED.values(), ids=OF_PADDED)
def test_mismatched_padded_images_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("mistral3", make_pair("mistral3"))
    call = pair.scene([1, Image(6, 10), 2, Image(4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


OF_ANYRES = {
    "no sizes": (lambda call: without(call, "image_sizes"), "pixel_values without image_sizes"),
    "a tile less": (
        lambda call: call | {"pixel_values": call["pixel_values"][:, :8]},
        r"pixel_values\[0\] has 8 tiles; an image of \(18, 30\) pixels has 9",
    ),
    "tiles of another size": (
        lambda call: call | {"pixel_values": call["pixel_values"][..., :-1]},
        r"shape \[pictures, tiles, 3, 10, 10\]",
    ),
    "another size": (
        lambda call: call | {"image_sizes": torch.tensor([[30, 18]])},
        r"the text has \d+ tokens of images",
    ),
    "an empty image": (
        lambda call: call | {"image_sizes": torch.tensor([[0, 18]])},
        r"image_sizes must be integers above 0 \[1, 2\]",
    ),
    "more images": (lambda call: call | {"batch_num_images": [2]}, "2 images together; found 1"),
    "counts alone": (
        lambda call: without(call, "pixel_values", "image_sizes"),
        "batch_num_images without pixel_values",
    ),
    "frames of another size": (
        lambda call: call | {"pixel_values_videos": call["pixel_values_videos"][0]},
        r"pixel_values_videos must be .* \[pictures, frames, 3, 10, 10\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), OF_ANYRES.values(), ids=OF_ANYRES)
def test_mismatched_anyres_tiles_are_refused(change, message, make_pair, pairs_made):
    family = "llava_onevision"
    pair = pairs_made.get(family) or pairs_made.setdefault(family, make_pair(family))
    call = pair.scene([1, Image(6, 10), 2, Video(3, 4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


OF_SQUARES = {
    "another size": (
        "gemma3",
        lambda call: call | {"pixel_values": call["pixel_values"][..., :-1]},
        r"shape \[images, 3, 16, 16\].*found torch.float32 of shape \(2, 3, 16, 15\)",
    ),
    "an image less": (
        "llava",
        lambda call: call | {"pixel_values": call["pixel_values"][:1]},
        "8 tokens of images and 0 of videos, and the pixels make 4 and 0",
    ),
    "no image": ("llava", lambda call: without(call, "pixel_values"), "was the text cut"),
    "no kinds": ("gemma3", lambda call: without(call, "token_type_ids"), "without token_type_ids"),
    "other kinds": (
        "gemma3",
        lambda call: call | {"token_type_ids": call["token_type_ids"].roll(1)},
        r"token_type_ids must be 1 where input_ids are 3 \(images\), and 0 elsewhere",
    ),
    "a prefix after the start": (
        "paligemma",
        lambda call: call | {"token_type_ids": 1 - call["token_type_ids"]},
        "token_type_ids must be 0 for a document's prefix",
    ),
}


@pytest.mark.parametrize(("family", "change", "message"), OF_SQUARES.values(), ids=OF_SQUARES)
def test_mismatched_square_images_are_refused(family, change, message, make_pair, pairs_made):
    pair = pairs_made.get(family) or pairs_made.setdefault(family, make_pair(family))
    call = pair.scene([1, Image(6, 10), 2, Image(4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


OF_PLACED = {
    "no places": (
        lambda call: without(call, "image_position_ids"),
        "pixel_values without image_position_ids",
    ),
    "no counts": (
        lambda call: without(call, "num_frames_per_video"),
        "pixel_values_videos and video_position_ids without num_frames_per_video",
    ),
    "no kinds": (lambda call: without(call, "mm_token_type_ids"), "without mm_token_type_ids"),
    "another order": (
        lambda call: call | {"image_position_ids": call["image_position_ids"].flip(2)},
        r"image_position_ids\[0\] must name the patches of 10 rows and 6 columns, row by row",
    ),
    "an odd number of rows": (
        lambda call: call | {"video_position_ids": call["video_position_ids"].masked_fill(ODD, -1)},
        r"video_position_ids\[0\] must name the patches of 3 rows and 4 columns",
    ),
    "other counts": (
        lambda call: call | {"num_frames_per_video": torch.tensor([3])},
        "of 2 steps together",
    ),
    "sound": (lambda call: call | {"input_features": torch.ones(1, 2, 3)}, "input_features"),
}
ODD = (torch.arange(96) >= 12)[:, None]


@pytest.mark.parametrize(("change", "message"), OF_PLACED.values(), ids=OF_PLACED)
def test_misplaced_patches_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.get("gemma4") or pairs_made.setdefault("gemma4", make_pair("gemma4"))
    call = pair.scenes.make([[1, Image(6, 10), 2, Video(2, 4, 4), 3]], "right")
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises((DataError, TypeError), match=message):
        pair.ours(**change(call))


OF_SHAPED = {
    "no shapes": (lambda call: without(call, "spatial_shapes"), "without spatial_shapes"),
    "no mask": (lambda call: without(call, "pixel_attention_mask"), "without pixel_attention_mask"),
    "another shape": (
        lambda call: call | {"spatial_shapes": torch.tensor([[6, 8], [4, 4]])},
        r"spatial_shapes\[0\] is \(6, 8\); .* here 60 of 96",
    ),
    "an odd number of rows": (
        lambda call: call | {"spatial_shapes": torch.tensor([[6, 10], [1, 16]])},
        r"spatial_shapes\[1\] is \(1, 16\); expected .* multiples of 2",
    ),
    "gaps": (
        lambda call: call | {"pixel_attention_mask": call["pixel_attention_mask"].flip(1)},
        "leading ones",
    ),
    "fewer shapes": (
        lambda call: call | {"spatial_shapes": torch.tensor([[6, 10]])},
        r"integers \[2, 2\]",
    ),
    "another width": (
        lambda call: call | {"pixel_values": call["pixel_values"][..., 1:]},
        r"shape \[images, patches, 27\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), OF_SHAPED.values(), ids=OF_SHAPED)
def test_shapes_that_do_not_fit_their_patches_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.get("lfm2_vl") or pairs_made.setdefault("lfm2_vl", make_pair("lfm2_vl"))
    call = pair.scene([1, Image(6, 10), 2, Image(4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


OF_TILES = {
    "no mask": (
        lambda call: without(call, "cross_attention_mask"),
        "got pixel_values and aspect_ratio_ids and aspect_ratio_mask without cross_attention_mask",
    ),
    "no pixels": (lambda call: without(call, "pixel_values"), "without pixel_values"),
    "an image less": (
        lambda call: call | {"aspect_ratio_ids": call["aspect_ratio_ids"] * torch.tensor([1, 0])},
        "names 2 images, and pixel_values and aspect_ratio_ids hold 1",
    ),
    "a ratio that is not known": (
        lambda call: call | {"aspect_ratio_ids": call["aspect_ratio_ids"] + 5},
        r"aspect_ratio_ids must be from 0 \(no image\) to 5",
    ),
    "tiles of another size": (
        lambda call: call | {"pixel_values": call["pixel_values"][..., 1:]},
        r"pixel_values must be floating point of shape \(1, 2, 3, 3, 14, 14\)",
    ),
    "tokens of another text": (
        lambda call: call | {"cross_attention_mask": call["cross_attention_mask"][:, 1:]},
        r"must begin with the shape of the tokens, \(1, 8\)",
    ),
    "a document in two rows": (
        lambda call: (
            {
                name: (x[:, :, :1] if name == "cross_attention_mask" else x)
                .unflatten(1, (2, -1))
                .flatten(0, 1)
                for name, x in call.items()
            }
            | {"cu_seqlens": torch.tensor([0, 8])}
        ),
        "in another row than some of its text",
    ),
}


@pytest.mark.parametrize(("change", "message"), OF_TILES.values(), ids=OF_TILES)
def test_mismatched_tiles_are_refused(change, message, make_pair, pairs_made):
    pair = pairs_made.setdefault("mllama", make_pair("mllama"))
    call = pair.scene([1, Image(6, 6), 2, Image(4, 4), 3])
    assert pair.ours(**call).loss.isfinite()
    with pytest.raises(DataError, match=message):
        pair.ours(**change(call))


def test_two_pictures_need_text_between_them(make_pair, pairs_made):
    """As in the reference, adjacent pictures would be treated as one."""
    pair = pairs_made.setdefault("qwen2_5_vl", make_pair("qwen2_5_vl"))
    with pytest.raises(DataError, match="with text between them"):
        pair.ours(**pair.scene([1, Image(4, 4), Image(4, 4), 3]))


@pytest.mark.parametrize("family", ["qwen2_vl", "mllama"])
def test_an_unknown_keyword_is_refused(pair):
    with pytest.raises(TypeError, match="of_no_meaning"):
        pair.ours(**pair.scene([1, Image(4, 4), 2], [1, Video(1, 4, 4), 2]), of_no_meaning=torch.ones(1))


@pytest.mark.parametrize("family", ["gemma3", "mllama", "qwen2_5_vl"])
def test_a_teacher_without_vision_is_refused_for_images(family, make_pair, pairs_made):
    pair = pairs_made.get(family) or pairs_made.setdefault(family, make_pair(family))
    call = pair.scene([1, Image(4, 4), 3])
    assert pair.ours.distill(pair.ours, **pair.scene([9])).loss.isfinite()
    with pytest.raises(DataError, match="no images"):
        pair.ours.distill(pair.ours, **call)
