"""PEFT's adapters on a native model, the head's too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

peft = pytest.importorskip("peft")


@pytest.fixture
def batch():
    ids = torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, :8] = -100
    return {"input_ids": ids, "labels": labels}


def adapt(model, *targets, **settings):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM", **settings
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("chunk", [4096, 4])
@pytest.mark.parametrize("level", ["lean", "checkpoint"])
def test_an_adapted_head_has_the_loss_of_its_logits(level, chunk, make_model, batch, monkeypatch):
    monkeypatch.setattr("liger_models.layers.head._CHUNK", chunk)
    model = adapt(make_model(level, tie_word_embeddings=False), "lm_head", "o_proj")
    found = model(**batch).loss
    assert found.shape == ()
    logits = model(batch["input_ids"]).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # float32, sums in another order
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = (torch.autograd.grad(loss, trained) for loss in (found, expected))
    for ours, whole in zip(*gradients, strict=True):
        assert whole.any()
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item())


def test_an_adapted_head_divides_by_the_given_count(make_model, batch):
    model = adapt(make_model(tie_word_embeddings=False), "lm_head")
    labels = int((batch["labels"][:, 1:] != -100).sum())
    expected = model(**batch).loss * labels / 40
    for count in (40, torch.tensor(40)):
        torch.testing.assert_close(model(**batch, num_items_in_batch=count).loss, expected)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert model(**nothing, num_items_in_batch=40).loss == 0


def test_a_head_that_is_trained_beside_adapters_has_the_same_loss(make_model, batch):
    model = make_model(tie_word_embeddings=False)
    expected = model(**batch).loss
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    )
    torch.testing.assert_close(adapted(**batch).loss, expected, rtol=1e-5, atol=0)
