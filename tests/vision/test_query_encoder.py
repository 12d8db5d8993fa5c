"""Images as learned queries (DeepSeek-OCR 2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pairs import beyond_bound

from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError
from liger_models.layers.vision.crops import crops_in_grid

IMAGE = 3
# Patches of one pixel, so that few pixels make more features than there are queries for crops.
SAM = find_architecture("deepseek_ocr2").tiny["vision_config"]["sam_config"]
MANY = {
    "sam_config": {
        **SAM,
        "patch_size": 1,
        "image_size": 52,
        "num_hidden_layers": 1,
        "global_attn_indexes": [0],
    }
}


def call(side: int, crops: int, crop: int, tokens: int) -> dict[str, torch.Tensor]:
    """An image and crops of it, with this number of tokens."""
    ids = torch.tensor([[11, *[IMAGE] * tokens, 12, 13, 14]])
    made = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "pixel_values": 0.1 * torch.randn(1, 3, side, side),
        "num_local_patches": torch.tensor([crops]),
    }
    return made | ({"pixel_values_local": 0.1 * torch.randn(crops, 3, crop, crop)} if crops else {})


def test_an_image_has_more_queries_than_its_crops(make_pair):
    """Of 169 and of 25 features; every gradient, also those of both tables of queries."""
    pair = make_pair("deepseek_ocr2", {"vision_config": MANY})
    given = call(52, 2, 20, 256 + 2 * 144 + 1)
    ours, expected = pair.run_ours(**given), pair.run_reference(**given)
    assert not beyond_bound(ours.distances(expected))
    tables = [name for name in ours.gradients if "query" in name or "queries" in name]
    assert len(tables) == 2, ours.gradients.keys()


def test_a_wrong_number_of_placeholders_is_refused(make_pair, pairs_made):
    pair = pairs_made.setdefault("deepseek_ocr2", make_pair("deepseek_ocr2"))
    with pytest.raises(DataError, match=r"289.*290|290.*289"):
        pair.ours(**call(24, 1, 12, 144 + 144 + 2))


SIZES = [(769, 768), (768, 1600), (3000, 1000), (1000, 3000), (1500, 1600), (4000, 500)]


def test_the_number_of_crops_is_that_of_the_processor():
    """With crops of 768 pixels, in grids of 2 to 6; an image that fits into a crop has none."""
    processor = pytest.importorskip("transformers").DeepseekOcr2ImageProcessorPil()
    for size in SIZES:
        assert crops_in_grid(*size, 768, 6) == processor.get_number_of_image_patches(*size) - 1, size
    small = processor(np.zeros((768, 30, 3), np.uint8), return_tensors="pt")
    assert crops_in_grid(768, 30, 768, 6) == 0
    assert "pixel_values_local" not in small
    assert small["pixel_values"].shape == (1, 3, 1024, 1024)
