"""The tokens of images of any size are those of the reference, whatever their proportions; test_parity.py has
only some.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_models.layers.vision.anyres import Newline, best_resolution, of_tiles

RESOLUTIONS = [(h, w) for h in (10, 20, 30) for w in (10, 20, 40)]


def test_the_tokens_of_every_size_are_the_references(make_pair):
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
