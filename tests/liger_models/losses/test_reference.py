"""Reference scores: computed with adapters disabled, and cached in a file."""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.losses import (
    reference_log_probs,
    sequence_log_probs,
    shared_prompts,
    without_adapters,
)


@pytest.fixture
def model():
    model = liger_models.from_config(find_architecture("llama").tiny)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def batches(model):
    ids = torch.randint(model.spec.vocab_size, (2, 2, 7))
    return [
        {"input_ids": rows, "labels": rows.masked_fill(torch.rand(rows.shape) < 0.3, -100)} for rows in ids
    ]


def test_a_model_with_its_adapters_disabled_is_its_own_reference(model):
    peft = pytest.importorskip("peft")
    (batch, _) = batches(model)
    expected = model.score(**batch).log_probs
    config = peft.LoraConfig(r=2, target_modules=["o_proj", "lm_head"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)
    trained = {name: p.requires_grad for name, p in adapted.named_parameters()}
    with without_adapters(adapted):
        # PEFT has wrapped the head, which therefore computes all logits at once.
        torch.testing.assert_close(adapted.score(**batch).log_probs, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(adapted.score(**batch).log_probs, expected)
    assert {name: p.requires_grad for name, p in adapted.named_parameters()} == trained
    scores = adapted.score(**batch)
    scores.log_probs.sum().backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_a_model_without_adapters_or_with_merged_ones_is_refused(model):
    with pytest.raises(ValueError, match="no adapters"), without_adapters(model):
        pass
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["o_proj"])
    adapted = peft.inject_adapter_in_model(config, model)
    adapted.layers[0].self_attn.o_proj.merge()
    with pytest.raises(ValueError, match="merged"), without_adapters(adapted):
        pass


def test_a_model_that_trains_more_than_adapters_is_refused(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], bias="all")
    adapted = peft.inject_adapter_in_model(config, model)
    with (
        pytest.raises(ValueError, match=r"\.bias is trained in addition to its adapters"),
        without_adapters(adapted),
    ):
        pass


def test_cached_scores_depend_on_the_enabled_adapters(model, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    adapted, path = peft.inject_adapter_in_model(config, model), tmp_path / "reference.safetensors"
    given = batches(model)[:1]

    def same_without_a_file():
        found = reference_log_probs(adapted, given, path)[0]
        assert torch.equal(found, reference_log_probs(adapted, given)[0])
        return found

    with_them = same_without_a_file()
    with without_adapters(adapted):
        without = same_without_a_file()
    adapted.layers[0].token_mixer.o_proj.scaling["default"] *= 2
    assert not torch.equal(with_them, without)
    assert not torch.equal(with_them, same_without_a_file())


def test_cached_scores_depend_on_all_arguments(model, tmp_path):
    row = torch.randint(model.spec.vocab_size, (1, 14))
    call = {"input_ids": row, "labels": row, "cu_seqlens": torch.tensor([0, 8, 14])}
    items = [([5, 9, 2], [[7, 8, 1], [4, 1]]), ([6, 3], [[3, 1], [2, 2, 1]])]
    calls = [call, call | {"temperature": 0.5}, call | {"parents": [-1, 0]}]
    calls += [shared_prompts(items), shared_prompts(items, by_rank=True)]
    for given in calls:
        (kept,) = reference_log_probs(model, [given], tmp_path / "reference.safetensors")
        assert torch.equal(kept, reference_log_probs(model, [given])[0])


def test_reference_scores_are_cached_by_weights_and_batches(model, tmp_path):
    given, calls = batches(model), []
    score = model.score
    model.score = lambda **batch: calls.append(1) or score(**batch)
    expected = [sequence_log_probs(score(**batch).log_probs).detach() for batch in given]
    path = tmp_path / "reference.safetensors"
    for _ in range(2):
        found = reference_log_probs(model, given, path)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert len(calls) == 2
    assert not found[0].requires_grad
    assert model.training
    other = {**given[0], "labels": given[0]["input_ids"]}
    reference_log_probs(model, [given[1], other], path)
    assert len(calls) == 3  # the new batch
    with torch.no_grad():
        model.norm.weight[0] += 1e-3
    changed = reference_log_probs(model, given, path)
    assert len(calls) == 5
    assert not torch.equal(changed[0], found[0])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
