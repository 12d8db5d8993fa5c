"""Tokens of images of any size and aspect ratio match the reference; test_parity.py has only some sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from scenes import Video

from liger_models.convert.errors import DataError
from liger_models.layers.grids.anyres import NEWLINE, Newline, best_resolution, of_tiles
from liger_models.layers.vision.packing import VisionConversation, pack_conversations

RESOLUTIONS = [(h, w) for h in (10, 20, 30) for w in (10, 20, 40)]


def test_tokens_of_images_of_every_size_match_the_reference(make_pair):
    pytest.importorskip("transformers")
    changes = {"image_grid_pinpoints": [list(r) for r in RESOLUTIONS], "vision_aspect_ratio": "anyres_max_3"}
    model = make_pair("llava_onevision", changes).reference.model
    newline = Newline(64)
    newline.weight.data = model.image_newline.data
    for height, width in itertools.product((1, 7, 19, 20, 41, 200), repeat=2):
        h, w = best_resolution(height, width, RESOLUTIONS)
        features = torch.randn(1 + h // 10 * (w // 10), 9, 64)
        (expected,), _ = model.pack_image_features(
            [features], torch.tensor([[height, width]]), model.image_newline, "anyres_max_3"
        )
        taps = of_tiles(3, h // 10, w // 10, height, width, 3)
        found = newline(features.flatten(0, 1), [taps], [features[..., 0].numel()])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_videos_of_several_lengths_are_packed_frame_by_frame(make_pair):
    pair = make_pair("llava_onevision")
    calls = [pair.scene(document) for document in ([3, Video(2, 4, 4), 4], [2, Video(3, 4, 4), 5], [6])]
    seen = []
    for call in calls:
        call.pop("batch_num_images", None)  # there are no images
        images = pair.images(call)
        seen.append(VisionConversation(call["input_ids"][0], call["labels"][0] != -100, images))
    packed = pack_conversations(pair.vision, seen)
    assert packed["num_frames_per_video"].tolist() == [2, 3]
    ids = torch.cat([one.ids for one in seen])[None]
    bounds = torch.tensor([0, *(len(one.ids) for one in seen)]).cumsum(0)
    with torch.no_grad():
        together = pair.ours(ids, cu_seqlens=bounds, **packed).logits
        alone = [pair.ours(**{**call, "labels": None}).logits for call in calls]
        torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
        packed["num_frames_per_video"] += 1
        with pytest.raises(DataError, match=r"num_frames_per_video is \[3, 4\], 7 frames together; found 5"):
            pair.ours(ids, cu_seqlens=bounds, **packed)


def test_the_gradient_of_a_feature_that_ends_many_rows_is_rounded_once():
    rows, newline = 100, Newline(64).bfloat16()
    taps = of_tiles(10, rows // 10, 1, 10 * rows, 10, None)
    size = 10 * 10 * (rows // 10 + 1)
    torch.manual_seed(0)
    torch.nn.init.normal_(newline.weight)
    found = newline(torch.randn(size, 64, dtype=torch.bfloat16), [taps], [size])
    upstream = torch.randn_like(found)
    found.backward(upstream)
    ends = (taps.features[:, 0] == NEWLINE).nonzero()[:, 0]
    assert len(ends) == rows
    exact = upstream[ends].double().sum(0)
    assert (newline.weight.grad.double() - exact).norm() <= 2**-9 * 1.01 * exact.norm()
