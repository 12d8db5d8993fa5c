"""Multi-token prediction in vision-language models: tokens ahead may be image tokens."""

from __future__ import annotations

import torch
from randomised import randomise
from scenes import Image

import liger_models


def test_the_embeddings_ahead_have_the_features_of_images(make_pair):
    """A call with images has the losses of one with their features and positions given."""
    pair = make_pair("qwen3_5")
    torch.manual_seed(0)
    model = randomise(liger_models.from_config(pair.config, mtp=True, device="cpu"))
    call = pair.scene([1, Image(4, 4), 7, 9, Image(6, 4), 8, 2])
    options = {"labels": call["labels"], "mtp_weight": 0.5}
    seen = model(**call, mtp_weight=0.5, output_hidden_states=True)
    names = ("input_ids", "image_grid_thw", "mm_token_type_ids")
    axes = pair.reference.model.get_rope_index(**{name: call[name] for name in names})[0]
    given = model(inputs_embeds=seen.hidden_states[0], position_ids=axes, **options)
    for name in ("loss", "mtp_loss"):
        torch.testing.assert_close(seen[name], given[name], rtol=1e-5, atol=0)
    words = call["input_ids"].where(call["input_ids"] != model.spec.vision.image_id, 5)
    without = model(words, position_ids=axes, **options)
    assert abs(without.mtp_loss - seen.mtp_loss) > 1e-3
    seen.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
