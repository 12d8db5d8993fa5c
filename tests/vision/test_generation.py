"""Generation after images equals the reference's."""

from __future__ import annotations

import pytest
import torch
from scenes import Image, rows_of_prompts

from liger_models.generating.generation import generate


@pytest.mark.of_layers("tokens")
def test_tokens_equal_the_references(pair):
    """Rows have several lengths, with images, videos or none, padded on the left for the reference."""
    call = rows_of_prompts(pair)
    del call["labels"]
    reference = pair.reference.eval()
    with torch.no_grad():
        expected = reference.generate(
            **call, max_new_tokens=6, do_sample=False, pad_token_id=9, eos_token_id=None
        )
    found = generate(pair.ours, **call, max_new_tokens=6)
    reference.train()
    # A generated image token without an image continues from inputs that no processor would produce.
    named = sum(expected == id for id in (pair.vision.image_id, getattr(pair.vision, "video_id", None)) if id)
    before = call["input_ids"].shape[1]
    known = named[:, before:].cumsum(1) - named[:, before:] == 0
    assert known.all(1).sum() >= 2
    assert torch.equal(found[:, before:][known], expected[:, before:][known])


@pytest.mark.parametrize("family", ["qwen2_vl", "mllama"])
def test_an_unknown_keyword_is_refused(pair):
    call = pair.scene([1, Image(4, 4), 2])
    del call["labels"]
    with pytest.raises(TypeError, match="of_no_meaning"):
        generate(pair.ours, **call, of_no_meaning=torch.ones(1), max_new_tokens=2)
