"""Models of transformers with adapters in batch_invariant(): the same bits alone and packed."""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.kernels.invariant import blocks


@pytest.mark.parametrize("split", [False, True])
def test_logits_of_an_adapted_model_have_the_same_bits_alone_and_packed(make_both, monkeypatch, split):
    peft = pytest.importorskip("peft")
    multiply = blocks._multiply

    def by_count(a, b, c, out, beta, alpha):  # a library whose rows depend on how many there are
        return multiply(a, b, c, out, beta, alpha).mul_(1 + 2**-20 * (len(a) % 64))

    model = make_both("llama").ours
    if split:
        model.split_projections()
    torch.manual_seed(0)
    targets = ["q_proj", "down_proj"] if split else ["o_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, settings).eval()
    documents = [torch.randint(5, 60, (length,)) for length in (7, 3, 18)]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    monkeypatch.setattr(blocks, "_multiply", by_count)
    blocks._sizes_of.cache_clear()
    try:
        with torch.no_grad(), liger_models.batch_invariant():
            alone = [model(input_ids=document[None]).logits[0] for document in documents]
            packed = model(input_ids=torch.cat(documents)[None], position_ids=positions, use_cache=False)
    finally:
        blocks._sizes_of.cache_clear()
    assert torch.equal(packed.logits[0], torch.cat(alone))
