"""Images given by row, with images of zeros that fill up the rows, and positions by fractions of an image."""

from __future__ import annotations

import pytest
import torch
from pairs import beyond_bound
from scenes import Image

from liger_models.convert.errors import DataError
from liger_models.layers.vision import processor_inputs
from liger_models.layers.vision.position_table import FractionPositions


@pytest.fixture(scope="module")
def pair(make_pair):
    return make_pair("idefics3")


@pytest.fixture
def call(pair):
    """Rows of one image and of two."""
    return pair.rows_of_one_length([[1, Image(4, 4), 9], [2, Image(4, 4), 2, Image(4, 4), 1]])


def loss(pair, call):
    with torch.no_grad():
        return pair.ours(**call).loss


def test_the_mask_is_not_needed(pair, call):
    expected = loss(pair, call)
    del call["pixel_attention_mask"]
    assert torch.equal(loss(pair, call), expected)


def test_all_images_may_have_another_size(pair):
    """Here of 8 x 8 patches, in place of 4 x 4: two tokens to a side become four."""
    token, images = pair.vision.image_id, torch.randn(2, 1, 3, 24, 24)
    ids = torch.tensor([[20, *[token] * 16, 21, 22], [23, 24, *[token] * 16, 25]])
    labels = ids.masked_fill(ids == token, -100)
    assert not beyond_bound(pair.distances(input_ids=ids, labels=labels, pixel_values=images))


def test_images_that_fill_up_rows_are_not_waited_for(pair, call, monkeypatch):
    """After a call without such images, a device is not waited for to learn their number: they are encoded,
    too, and have no tokens.
    """
    monkeypatch.setattr(processor_inputs, "_waits", lambda x: True)
    vision, pixels, mask = pair.ours.vision, call["pixel_values"], call["pixel_attention_mask"]
    vision.all_shown = True
    assert not beyond_bound(pair.distances(**call))
    assert not vision.all_shown  # the next call waits, and encodes fewer
    one = {**{name: x[:1] for name, x in call.items()}, "pixel_values": pixels[:1, :1]}
    loss(pair, one | {"pixel_attention_mask": mask[:1, :1]})
    assert vision.all_shown
    with pytest.raises(DataError, match="hides a part of an image"):
        loss(pair, call | {"pixel_attention_mask": mask.index_fill(3, torch.tensor([0]), 0)})
    vision.all_shown = True
    with pytest.raises(DataError, match=r"the text has 12 tokens of images .* and the pixels make 8"):
        loss(pair, call | {"pixel_attention_mask": mask.index_fill(0, torch.tensor([0]), 0)})


@pytest.mark.parametrize("side", [4, 26, 27, 32])
def test_positions_are_those_of_the_reference(side):
    """Also where a fraction lies on a border, on whose side rounding decides."""
    found = pytest.importorskip("transformers.models.idefics3.modeling_idefics3")
    config = found.Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1, num_attention_heads=1)
    theirs, ours = found.Idefics3VisionEmbeddings(config), FractionPositions(side**2, 1, side, False)
    torch.nn.init.zeros_(theirs.patch_embedding.weight)
    torch.nn.init.zeros_(theirs.patch_embedding.bias)
    with torch.no_grad():
        theirs.position_embedding.weight.copy_(torch.arange(side**2)[:, None])
        ours.weight.copy_(torch.arange(side**2)[:, None])
        for size in (1, 3, side, 2 * side, 50):
            seen = torch.ones(1, size, size, dtype=torch.bool)
            expected = theirs(torch.zeros(1, 3, size, size), seen)[0]
            assert torch.equal(ours([(1, size, size)], 1), expected), size


def test_what_does_not_fit_is_refused(pair, call):
    pixels, mask = call["pixel_values"], call["pixel_attention_mask"]
    with pytest.raises(DataError, match=r"pixel_values must be of shape \[rows, images"):
        loss(pair, call | {"pixel_values": pixels[0]})
    with pytest.raises(DataError, match="pixel_attention_mask has the shape"):
        loss(pair, call | {"pixel_attention_mask": mask[..., 1:]})
    with pytest.raises(DataError, match="hides a part of an image"):
        loss(pair, call | {"pixel_attention_mask": mask.index_fill(3, torch.tensor([0]), 0)})
