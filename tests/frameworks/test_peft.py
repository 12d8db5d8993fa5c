"""PEFT's adapters on a native model, including the head."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from torch import nn

peft = pytest.importorskip("peft")

from peft.tuners.lora.layer import Linear as PeftLinear  # noqa: E402

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def batch():
    ids = torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, :8] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture
def make_split(make_model):
    """Factory of models with split projections and the same parameters."""

    def make():
        model = make_model(tie_word_embeddings=False)
        model.split_projections()
        return model

    return make


def adapt(model, *targets, **settings):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM", **settings
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("chunk", [4096, 4])
@pytest.mark.parametrize("level", ["lean", "checkpoint"])
def test_an_adapted_head_has_the_loss_of_its_logits(level, chunk, make_model, batch, monkeypatch):
    monkeypatch.setattr("liger_models.layers.model.head._CHUNK", chunk)
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


def test_a_head_trained_together_with_adapters_has_the_same_loss(make_model, batch):
    model = make_model(tie_word_embeddings=False)
    expected = model(**batch).loss
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    )
    torch.testing.assert_close(adapted(**batch).loss, expected, rtol=1e-5, atol=0)


def with_pefts_layers(model):
    """Copy of the model with PEFT's own LoRA layers."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, PeftLinear):
            module.__class__ = PeftLinear
    return model


def run(model, batch):
    """Loss and every gradient, with the same random numbers each time."""
    torch.manual_seed(5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = model(**batch).loss
    return {"loss": loss.detach()} | dict(
        zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)
    )


def assert_near(found, expected):
    """Assert equality up to float32 sums in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item(), msg=name
        )


def bytes_a_token(model):
    """Bytes per token that the forward pass keeps for the backward pass."""
    kept = []
    for tokens in (64, 128):
        ids = torch.randint(61, (1, tokens), generator=torch.Generator().manual_seed(0))
        with LiveBytes([ids, *model.parameters(), *model.buffers()]) as live:
            loss = model(input_ids=ids, labels=ids).loss
            kept.append(live.now)
        del loss
    return (kept[1] - kept[0]) / 64


def test_float32_adapters_keep_as_much_as_in_the_registered_class(make_split, tmp_path):
    """PEFT's own layers keep a float32 copy of each input."""
    pytest.importorskip("transformers")
    from liger_models.hf import classes_of

    native = make_split().to(torch.bfloat16)
    native.save_pretrained(tmp_path)
    registered = classes_of("llama").causal_lm.from_pretrained(tmp_path, dtype=torch.bfloat16)
    registered.split_projections()
    ours, theirs = (adapt(model, *ALL).train() for model in (native, registered))
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    assert bytes_a_token(ours) == bytes_a_token(theirs) < bytes_a_token(with_pefts_layers(ours))


@pytest.mark.parametrize(
    "settings", [{}, {"lora_dropout": 0.3}, {"use_dora": True}, {"lora_bias": True}], ids=str
)
def test_adapters_match_pefts_own_layers(settings, make_split, batch):
    # Dropout only on layers that share no input: layers that do are one operation, which draws its masks in
    # another order than PEFT's separate layers.
    targets = ("o_proj", "down_proj") if settings.get("lora_dropout") else ALL
    model = adapt(make_split(), *targets, **settings).train()
    assert_near(run(model, batch), run(with_pefts_layers(model), batch))


def test_adapters_switch_merge_and_unload_as_in_peft(make_split, batch):
    plain = make_split()
    expected = plain(**batch).loss
    model = adapt(plain, *ALL)
    torch.manual_seed(2)
    model.add_adapter(
        "other", peft.LoraConfig(r=2, target_modules=["lm_head", "o_proj"], init_lora_weights=False)
    )
    model.train()
    for names in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(names)
        assert_near(run(model, batch), run(with_pefts_layers(model), batch))
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch).loss, expected)
    model.set_adapter("default")
    adapted = model(**batch).loss
    assert not torch.allclose(adapted, expected)
    merged = model.merge_and_unload()
    assert not hasattr(merged, "peft_config")
    assert not any(isinstance(module, PeftLinear) for module in merged.modules())
    torch.testing.assert_close(merged.train()(**batch).loss, adapted, rtol=1e-5, atol=0)


def test_a_second_adapter_in_other_layers_runs_like_the_first(make_split):
    model = adapt(make_split(), "q_proj")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["down_proj"]))
    model.train()
    adapted = [module for module in model.modules() if isinstance(module, PeftLinear)]
    assert len(adapted) == 4
    assert not any(type(module) is PeftLinear for module in adapted)


def test_a_file_of_adapters_is_read_back(make_split, batch, tmp_path):
    model = adapt(make_split(), *ALL).eval()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_split(), tmp_path).eval()
    assert {type(m) for m in again.modules() if isinstance(m, PeftLinear)} == {
        type(m) for m in model.modules() if isinstance(m, PeftLinear)
    }
    assert torch.equal(again(**batch).loss, model(**batch).loss)


def test_other_models_keep_pefts_own_layers(make_split):
    adapt(make_split(), *ALL)
    other = peft.get_peft_model(nn.Sequential(nn.Linear(4, 5)), peft.LoraConfig(target_modules=["0"]))
    assert type(other.base_model.model[0]) is PeftLinear
