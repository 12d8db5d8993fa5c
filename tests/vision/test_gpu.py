"""On a GPU: vision-language models in bfloat16 at published widths are as accurate as the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from scenes import VisionPair, older_transformers
from wide import (  # noqa: F401  (fixtures among them)
    batches_of,
    emptied,
    exact_float32,
    farther_than_reference,
    wide_config,
)

from liger_models.images.scenes import Image, Video
from liger_models.images.sounds import Sound

pytestmark = pytest.mark.gpu

# Sides that all projectors can merge, by two, three or four patches.
DOCUMENTS = [
    [60, Image(24, 36), 200, Video(2, 12, 24), 100],
    [Image(36, 12), 100, Image(12, 12), 60],
]


def test_bfloat16_at_real_widths_is_as_accurate_as_the_reference(family, emptied):  # noqa: F811
    """Compare logits, loss and every gradient of encoder, projector and language model."""

    def batches(pair):
        torch.manual_seed(0)
        count = batches_of(pair.ours.spec)
        heard = [] if pair.ours.spec.audio is None else [Sound(40), 20]
        documents = [[*document, *heard] for document in DOCUMENTS]
        return [pair.rows_of_one_length(documents, near_ties=True) for _ in range(count)]

    config = wide_config(family)
    if family == "paligemma" and older_transformers():  # does not cap PaliGemma 2's logits
        config["text_config"]["final_logit_softcapping"] = None
    assert not farther_than_reference(family, config, batches, VisionPair)


def test_packed_documents_with_tiles_equal_scoring_all_tokens_with_all_images(make_pair):
    """Owners of images are known if the mask is on the host, as in training runs."""
    pair = make_pair("mllama")
    alone = [
        pair.scene(document) for document in ([2, Image(6, 10), 5], [21], [Image(2, 4), 5, Image(4, 4), 3])
    ]
    bounds = torch.tensor([0, *itertools.accumulate(call["input_ids"].shape[1] for call in alone)])
    pair.ours.cuda()
    on_host = {"cu_seqlens": bounds, "cross_attention_mask": None}
    results = []
    for device in ("cpu", "cuda"):
        call = pair.pack(alone)
        on_host["cross_attention_mask"] = call.pop("cross_attention_mask").to(device)
        results.append(pair.run_ours(**{name: x.cuda() for name, x in call.items()}, **on_host))
    by_blocks, whole = results
    assert max(by_blocks.distances(whole).values()) <= 1e-5
