"""Generation after images equals the reference's."""

from __future__ import annotations

import pytest
import torch
from scenes import DOCUMENTS, Image

from liger_models.generating.generation import generate


def test_the_tokens_are_those_of_the_reference(pair):
    """Rows of several lengths, with images, videos and none, padded on the left for the reference."""
    call = pair.scene(*DOCUMENTS.values(), padding="left")
    del call["labels"]
    reference = pair.reference.eval()
    with torch.no_grad():
        expected = reference.generate(
            **call, max_new_tokens=6, do_sample=False, pad_token_id=9, eos_token_id=None
        )
    found = generate(pair.ours, **call, max_new_tokens=6)
    reference.train()
    # One that names a picture where none is goes on from nothing that a processor would give.
    named = sum(expected == id for id in (pair.vision.image_id, getattr(pair.vision, "video_id", None)) if id)
    before = call["input_ids"].shape[1]
    known = named[:, before:].cumsum(1) - named[:, before:] == 0
    assert known.all(1).sum() >= 2
    assert torch.equal(found[:, before:][known], expected[:, before:][known])


def test_a_keyword_that_is_not_known_is_refused(pair):
    call = pair.scene([1, Image(4, 4), 2])
    del call["labels"]
    with pytest.raises(TypeError, match="of_no_meaning"):
        generate(pair.ours, **call, of_no_meaning=torch.ones(1), max_new_tokens=2)
