"""PEFT adapters with the usual names are interchangeable between our and transformers' own models."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from randomised import randomise_trained
from safetensors.torch import load_file, save_file

import liger_models

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(model, targets=USUAL, **settings):
    """Add random adapters, which change the model's output."""
    config = peft.LoraConfig(
        r=3, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **settings
    )
    return randomise_trained(peft.get_peft_model(model, config)).eval()


def tensors(folder):
    return load_file(folder / "adapter_model.safetensors")


WAYS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 5}},
    "head": {"targets": [*USUAL, "lm_head", "embed_tokens"]},
    "saved": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.supports(
    "PEFT", "LoRA", "rsLoRA", "DoRA", "rank patterns", "head and embeddings", "modules_to_save"
)
@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_split_projections_match_the_reference(way, make_both, batch, tmp_path):
    family = "gemma2" if way == "head" else "llama"  # scales embeddings, adapters included
    both = make_both(family, projections="split")
    theirs = adapt(both.reference, **WAYS[way])
    theirs.save_pretrained(tmp_path / "theirs_adapter")
    ours = peft.PeftModel.from_pretrained(both.ours, tmp_path / "theirs_adapter", is_trainable=True).eval()
    expected, found = theirs(**batch), ours(**batch)
    assert relative_distance(found.loss, expected.loss) <= BOUND
    expected.loss.backward()
    found.loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert gradients.keys() == {name for name, p in ours.named_parameters() if p.requires_grad}
    for name, gradient in gradients.items():
        assert relative_distance(ours.get_parameter(name).grad, gradient) <= BOUND, name
    ours.save_pretrained(tmp_path / "ours_adapter")
    saved, again = (tensors(tmp_path / f"{whose}_adapter") for whose in ("theirs", "ours"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())


START = {
    "PiSSA": {"init_lora_weights": "pissa", "target_modules": USUAL},
    "OLoRA": {"init_lora_weights": "olora", "target_modules": USUAL},
    "trainable tokens": {"target_modules": USUAL, "trainable_token_indices": [3, 7]},
}


@pytest.mark.supports("PEFT", "PiSSA", "OLoRA", "trainable tokens")
@pytest.mark.parametrize("way", START)
def test_adapters_initialised_from_the_weights_match_the_reference(way, make_both, batch):
    """The output stays the same; adapters and remaining weights equal those of the reference."""
    both = make_both("gemma2" if way == "trainable tokens" else "llama", projections="split")
    before = both.reference(**batch).loss.detach()
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", **START[way])
    adapted = []
    for model in (both.reference, both.ours):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(model, config))
    theirs, ours = adapted
    expected, found = theirs(**batch).loss, ours(**batch).loss
    for loss in (found, expected):
        assert relative_distance(loss, before) <= 5 * BOUND  # the decomposition is in float32
    expected.backward()
    found.backward()
    for name, parameter in theirs.named_parameters():
        own = ours.get_parameter(name)
        assert relative_distance(own, parameter) <= BOUND, name
        if parameter.requires_grad and parameter.grad.any():
            assert relative_distance(own.grad, parameter.grad) <= 5 * BOUND, name
        assert own.requires_grad == parameter.requires_grad


@pytest.mark.supports("PEFT", "merging")
@pytest.mark.parametrize("projections", ["split", "fused"])
def test_merged_adapters_are_saved_as_a_checkpoint(projections, make_both, batch, tmp_path):
    both = make_both("llama", projections=projections)
    ours = adapt(both.ours, USUAL if projections == "split" else FUSED)
    expected = ours(**batch).loss
    assert relative_distance(expected, both.reference(**batch).loss) > 1e-3
    merged = ours.merge_and_unload()
    if projections == "split":
        merged.fuse_projections()
    merged.save_pretrained(tmp_path / "merged")
    again = type(both.reference).from_pretrained(tmp_path / "merged").eval()
    assert relative_distance(again(**batch).loss, expected) <= BOUND


@pytest.mark.parametrize("targets", [["qkv_proj", "gate_up_proj", "o_proj"], ["o_proj", "down_proj"]])
def test_adapters_of_fused_projections_train(targets, make_both, batch):
    both = make_both("llama")
    ours = adapt(both.ours, targets)
    ours.train()(**batch).loss.backward()
    assert all(p.grad.any() for p in ours.parameters() if p.requires_grad)


FUSED_WAYS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"qkv_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}},
    "saved": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.supports("PEFT", "adapters of packed projections", "their files under the usual names")
@pytest.mark.parametrize("way", FUSED_WAYS)
def test_adapters_of_fused_projections_are_exported_exactly_and_read_back(
    way, make_both, batch, tmp_path, hf
):
    both = make_both("llama")
    ours = adapt(both.ours, FUSED, **FUSED_WAYS[way])
    hf.save_adapter(ours, tmp_path / "usual")
    theirs = peft.PeftModel.from_pretrained(both.reference, tmp_path / "usual").eval()
    assert {name.split(".")[-3] for name in tensors(tmp_path / "usual") if "lora_A" in name} == set(USUAL)
    expected = ours(**batch).loss
    assert relative_distance(theirs(**batch).loss, expected) <= BOUND
    fresh = type(both.ours).from_pretrained(both.folder).eval()
    again = hf.load_adapter(fresh, tmp_path / "usual", is_trainable=True).eval()
    assert torch.equal(again(**batch).loss, expected)
    mine, back = (dict(m.named_parameters()) for m in (ours, again))
    assert mine.keys() == back.keys()
    assert all(torch.equal(back[name], p) for name, p in mine.items())
    hf.save_adapter(again, tmp_path / "back")
    first, second = tensors(tmp_path / "usual"), tensors(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("way", ["lora", "rslora", "dora", "some", "ranks"])
def test_adapters_with_the_usual_names_are_read_onto_fused_projections(way, make_both, batch, tmp_path, hf):
    both = make_both("llama")
    settings = {
        "some": {"targets": ["q_proj", "v_proj", "up_proj"]},
        "ranks": {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 16}},
    }.get(way, WAYS.get(way))
    theirs = adapt(both.reference, **settings)
    theirs.save_pretrained(tmp_path / "usual")
    ours = hf.load_adapter(both.ours, tmp_path / "usual").eval()
    seen = batch["attention_mask"].bool()
    expected = theirs(**batch).logits[seen]
    assert relative_distance(ours(**batch).logits[seen], expected) <= BOUND
    hf.save_adapter(ours, tmp_path / "again")
    split = make_both("llama", projections="split").ours
    again = peft.PeftModel.from_pretrained(split, tmp_path / "again").eval()
    assert relative_distance(again(**batch).logits[seen], expected) <= BOUND


def test_an_adapter_that_would_load_partially_is_an_error(make_both, tmp_path, hf):
    both = make_both("llama")
    adapt(both.reference).save_pretrained(tmp_path / "usual")
    with pytest.raises(ValueError, match=r"call model\.split_projections"):  # by PEFT, onto fused ones
        peft.PeftModel.from_pretrained(make_both("llama").ours, tmp_path / "usual")
    path = tmp_path / "usual" / "adapter_model.safetensors"
    halved = {name: x for name, x in load_file(path).items() if "layers.1.mlp.up_proj.lora_A" not in name}
    save_file(halved, path)
    for projections in ("fused", "split"):
        with pytest.raises(liger_models.CheckpointError):
            hf.load_adapter(make_both("llama", projections=projections).ours, tmp_path / "usual")
    config = json.loads((tmp_path / "usual" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == set(USUAL)


def test_usual_names_on_fused_projections_are_an_error_that_says_what_to_do(make_both):
    with pytest.raises(ValueError, match=r"call model\.split_projections"):
        adapt(make_both("llama").ours)
    # Layers of Gemma 4 that reuse another layer's keys and values have only a query projection, not packed.
    with pytest.raises(ValueError, match=r"q_proj, which is packed in it; call model\.split_projections"):
        adapt(make_both("gemma4_text").ours, ["qkv_proj", "q_proj"])


@pytest.mark.supports("PEFT", "gradient checkpointing")
def test_checkpointing_does_not_change_the_gradients_of_adapters(make_both, batch):
    both = make_both("llama", projections="split")
    ours = adapt(both.ours).train()
    ours(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in ours.named_parameters() if p.requires_grad}
    ours.zero_grad()
    ours.gradient_checkpointing_enable()
    ours.enable_input_require_grads()
    ours(**batch).loss.backward()
    for name, gradient in expected.items():
        assert relative_distance(ours.get_parameter(name).grad, gradient) <= BOUND, name


@pytest.mark.supports("PEFT", "experts by parameter")
def test_experts_can_be_adapted_by_parameter(make_both, batch):
    """LoRA on the stacked experts themselves, as PEFT applies it to transformers' own models."""
    both = make_both("qwen3_moe")
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    ours = peft.get_peft_model(both.ours, config).train()
    with torch.no_grad():
        for p in ours.parameters():
            if p.requires_grad:
                p.normal_(0, 0.1)
    loss = ours(**batch).loss
    loss.backward()
    assert loss != both.reference(**batch).loss
    assert all(p.grad.any() for p in ours.parameters() if p.requires_grad)


@pytest.mark.supports("PEFT", "IA3")
def test_ia3_on_split_projections_matches_the_reference(make_both, batch, tmp_path, hf):
    both, results = make_both("llama", projections="split"), []
    for model in (both.reference, both.ours):
        settings = {"target_modules": USUAL, "feedforward_modules": ["gate_proj", "down_proj"]}
        adapted = peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM", **settings))
        loss = randomise_trained(adapted).eval()(**batch).loss
        loss.backward()
        results.append((loss, {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}))
    (expected, truth), (found, ours) = results
    assert relative_distance(found, expected) <= BOUND
    assert truth.keys() == ours.keys()
    assert max(relative_distance(ours[name], truth[name]) for name in truth) <= BOUND
    hf.save_adapter(adapted, tmp_path / "ia3")
    fresh = type(both.ours).from_pretrained(both.folder)
    again = hf.load_adapter(fresh, tmp_path / "ia3").eval()
    assert torch.equal(again(**batch).loss, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ia3_layers_have_the_values_and_gradients_of_pefts_own_layers(dtype, make_both):
    settings = {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    model = make_both("llama", projections="split").ours.to(dtype)
    adapted = randomise_trained(peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM", **settings)))
    layers = [module for module in adapted.modules() if hasattr(module, "ia3_l") and module.ia3_l]
    assert {layer.is_feedforward for layer in layers} == {True, False}
    generator = torch.Generator().manual_seed(3)
    for ours in layers:
        x = torch.randn(5, ours.in_features, generator=generator).to(dtype)
        weights = torch.randn(5, ours.out_features, generator=generator).to(dtype)
        results = []
        for kind in (type(ours), next(c for c in type(ours).__mro__ if c.__module__.startswith("peft."))):
            layer, given = copy.deepcopy(ours), x.clone().requires_grad_()
            layer.__class__ = kind
            out = layer(given)
            (out * weights).sum().backward()
            results.append((out, given.grad, layer.ia3_l["default"].grad))
        assert type(ours) is not kind
        # The same operations on the same inputs.
        assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


@pytest.mark.parametrize("way", ["head", "saved"])
def test_inference_mode_equals_no_grad_with_a_replaced_head(way, make_both, batch):
    adapted = adapt(make_both("llama", projections="split").ours, **WAYS[way])
    assert type(adapted.get_base_model().lm_head) is not type(make_both("llama").ours.lm_head)
    for training in (False, True):
        adapted.train(training)
        results = []
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                results.append((adapted(**batch).loss, adapted(batch["input_ids"]).logits))
        assert all(torch.equal(found, expected) for expected, found in zip(*results, strict=True))


@pytest.mark.supports("PEFT", "prompt tuning")
def test_prompt_tuning_prepends_its_tokens(make_both, batch):
    both = make_both("llama")
    del batch["attention_mask"]
    batch["labels"] = batch["input_ids"].clone()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    theirs, ours = (peft.get_peft_model(m, config) for m in (both.reference, both.ours))
    ours.prompt_encoder.load_state_dict(theirs.prompt_encoder.state_dict())
    assert relative_distance(ours(**batch).loss, theirs(**batch).loss) <= BOUND
    # PEFT prepends prompts outside of the model, while `score` and `distill` are methods of the model.
    scores = ours(**batch, score=liger_models.ScoreOptions()).log_probs[:, 4:]
    expected = theirs(batch["input_ids"]).logits[:, 4:-1].log_softmax(-1)
    expected = expected.gather(2, batch["labels"][:, 1:, None]).squeeze(2)
    assert relative_distance(scores, expected) <= BOUND
    for call in (ours.score, ours.get_base_model().score, partial(ours.distill, both.ours)):
        with pytest.raises(RuntimeError, match="learned prompts were put in front of this model"):
            call(**batch)
    with ours.disable_adapter():
        scores = ours(**batch, score=liger_models.ScoreOptions()).log_probs
    expected = both.reference(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    expected = expected.gather(2, batch["labels"][:, 1:, None]).squeeze(2)
    assert relative_distance(scores, expected) <= BOUND


@pytest.mark.parametrize("adapted", [True, False])
def test_training_in_float16_is_refused_and_evaluation_is_not(adapted, make_both, batch):
    """Hidden states of Gemma 3 exceed 65504 and become NaN, also with float32 adapters on frozen weights."""
    model = make_both("gemma3_text").ours.half()
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))
    assert model.eval()(**batch).loss.isfinite()
    model.train()
    with pytest.raises(TypeError, match=r"weights in float16.*dtype=torch\.bfloat16"):
        model(**batch)
    with torch.no_grad():
        assert model(**batch).loss.isfinite()
    assert model.bfloat16()(**batch).loss.isfinite()


def test_a_layer_that_is_packed_in_another_order_is_named_in_the_error(make_both):
    """PEFT's default targets for the family, on fused projections."""
    ours = make_both("gpt_neox").ours
    with pytest.raises(
        ValueError, match=r"query_key_value: packed with others; call model\.split_projections"
    ):
        peft.get_peft_model(ours, peft.LoraConfig(task_type="CAUSAL_LM"))
    ours.split_projections()
    adapted = peft.get_peft_model(ours, peft.LoraConfig(task_type="CAUSAL_LM"))
    assert all(".query_key_value." in name for name, p in adapted.named_parameters() if p.requires_grad)
