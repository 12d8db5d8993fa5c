"""PEFT's LoRA on stacked experts has the same files as on transformers' own models, both ways."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from randomised import randomise_trained
from ranks import run_ranks
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.architectures import find_architecture
from liger_models.layers.experts.moe import Experts
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.recompute.activation_memory import LEVELS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from peft.tuners.lora.layer import ParamWrapper  # noqa: E402

# gpt-oss has transposed axes and another order, and Nemotron's experts have no gates.
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"]
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def adapt(model, parameters=STACKS, modules=(), **settings):
    """Add random adapters, which change the model's output."""
    if parameters is STACKS and model.config.model_type == "nemotron_h":
        parameters = ["experts.up_proj", "experts.down_proj"]
    config = peft.LoraConfig(
        r=3, target_modules=list(modules), target_parameters=parameters, init_lora_weights=False, **settings
    )
    return randomise_trained(peft.get_peft_model(model, config)).eval()


def tensors(folder):
    return load_file(folder / "adapter_model.safetensors")


def gradients(adapted):
    """Return the adapters' gradients in file order."""
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.copy_(p.grad)
    return peft.get_peft_model_state_dict(adapted)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_and_gradients_match_transformers(family, make_both, batch, tmp_path):
    both = make_both(family)
    theirs = adapt(both.reference, rank_pattern={"experts.down_proj": 2})
    theirs.save_pretrained(tmp_path / "theirs_adapter")
    ours = peft.PeftModel.from_pretrained(both.ours, tmp_path / "theirs_adapter", is_trainable=True).eval()
    seen = batch["attention_mask"].bool()
    without = type(both.ours).from_pretrained(both.folder).eval()(**batch).logits[seen]
    expected, found = theirs(**batch), ours(**batch)
    assert relative_distance(found.loss, expected.loss) <= BOUND
    assert relative_distance(found.logits[seen], without) > 0.01
    ours.save_pretrained(tmp_path / "ours_adapter")
    saved, again = (tensors(tmp_path / f"{whose}_adapter") for whose in ("theirs", "ours"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    expected.loss.backward()
    found.loss.backward()
    expected, found = gradients(theirs), gradients(ours)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert relative_distance(found[name], gradient) <= BOUND, name


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "qwen3_vl_moe"])
def test_families_with_transposed_stacks_declare_them_as_transformers_does(family):
    reference = getattr(transformers, find_architecture(family).reference)
    home = importlib.import_module(reference.__module__)
    (kind,) = (x for name, x in vars(home).items() if name.endswith("Experts") and isinstance(x, type))
    with torch.device("meta"):
        experts = kind(reference.config_class().get_text_config())
    assert getattr(experts, "is_transposed", False) == find_architecture(family).says_transposed


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_are_saved_as_a_checkpoint(family, make_both, batch, tmp_path):
    both = make_both(family)
    adapt(copy.deepcopy(both.reference)).save_pretrained(tmp_path / "adapter")
    results = {}
    for whose, model in (("theirs", both.reference), ("ours", both.ours)):
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
        adapted.merge_and_unload().save_pretrained(tmp_path / whose)
        results[whose] = load_file(tmp_path / whose / "model.safetensors")
    assert results["theirs"].keys() == results["ours"].keys()
    for name, tensor in results["theirs"].items():
        # One product of rank 3 and one sum.
        assert relative_distance(results["ours"][name], tensor) <= 1e-6, name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_that_transformers_loads_and_saves_itself_are_the_same(family, make_both, batch, tmp_path):
    both = make_both(family)
    theirs = adapt(both.reference)
    theirs.save_pretrained(tmp_path / "adapter")
    both.ours.load_adapter(tmp_path / "adapter")
    assert relative_distance(both.ours.eval()(**batch).loss, theirs(**batch).loss) <= BOUND
    both.ours.save_pretrained(tmp_path / "again")
    saved, again = tensors(tmp_path / "adapter"), tensors(tmp_path / "again")
    assert saved.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())


@pytest.fixture
def folds(monkeypatch):
    """The calls in which PEFT computes W + s B A of a stack."""
    calls, fold = [], ParamWrapper._activate_lora
    monkeypatch.setattr(
        ParamWrapper, "_activate_lora", lambda self, active: calls.append(self) or fold(self, active)
    )
    return calls


def gradients_of(adapted, batch):
    adapted.zero_grad()
    loss = adapted(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}


def switched(adapted, case):
    """Yield the model in a state that its adapters can be switched to."""
    if case == "two active":
        adapted.base_model.set_adapter(["default", "second"])
    elif case == "merged":
        adapted.merge_adapter(["second"])
    elif case == "merged and unmerged":
        adapted.merge_adapter()
        adapted.unmerge_adapter()
    elif case == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    elif case == "disabled":
        return adapted.disable_adapter()
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "case", ["one active", "two active", "disabled", "merged", "merged and unmerged", "autocast"]
)
def test_switched_adapters_match_pefts_own_forward(case, make_both, batch, folds):
    ours = adapt(make_both("qwen3_moe").ours, modules=["o_proj"]).train()
    ours.add_adapter("second", copy.deepcopy(ours.peft_config["default"]))
    ours.base_model.set_adapter("second")
    randomise_trained(ours)
    theirs = copy.deepcopy(ours)
    for module in theirs.modules():
        if isinstance(module, ParamWrapper):
            change_class(module, ParamWrapper)
    without = case in ("disabled", "merged")  # no trained path is left
    found, expected = [], []
    for adapted, results in ((ours, found), (theirs, expected)):
        before = len(folds)
        with switched(adapted, case):
            results.append(adapted(**batch).loss if without else gradients_of(adapted, batch))
        results.append(len(folds) - before)
    assert found[1] == 0
    assert (expected[1] > 0) == (not without)
    if without:
        assert torch.equal(found[0], expected[0])
        return
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        # As in test_lora.py: bfloat16 rounds by 2^-9, dozens of times in a row.
        bound = 2**-4 if case == "autocast" else BOUND
        assert relative_distance(found[0][name], value) <= bound, name


def test_native_models_run_the_same_operation(make_both, batch, folds):
    both = make_both("qwen3_moe", projections="split")
    expected = adapt(both.ours, modules=["o_proj"])
    native = adapt(liger_models.from_hub(both.folder, projections="split"), modules=["o_proj"])
    names = dict(native.named_parameters())
    with torch.no_grad():
        for name, p in expected.named_parameters():
            if ".lora_" in name:
                names[name.replace("model.model.model.", "model.model.")].copy_(p)
    loss = native(batch["input_ids"], labels=batch["labels"], attention_mask=batch["attention_mask"]).loss
    assert relative_distance(loss, expected(**batch).loss) <= BOUND
    loss.backward()
    assert all(p.grad.any() for p in native.parameters() if p.requires_grad)
    assert not folds


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_of_activation_memory_has_the_same_gradients(level, make_both, batch):
    ours = adapt(make_both("qwen3_moe").ours).train()
    results = []
    for each in ("all", level):
        ours.zero_grad()
        ours.base_model.model.set_activation_memory(each)
        ours(**batch).loss.backward()
        results.append({name: p.grad for name, p in ours.named_parameters() if p.requires_grad})
    assert results[0]
    for name, gradient in results[0].items():
        assert gradient.any()
        assert torch.equal(results[1][name], gradient), name


@pytest.mark.parametrize("family", FAMILIES)
def test_levels_that_fit_are_chosen(family, make_both, batch):
    both = make_both(family)
    adapted = adapt(both.ours).train()
    both.ours.set_activation_memory("auto", memory_budget="1GiB")
    adapted(**batch).loss.backward()
    assert set(both.ours.activation_memory) == {"all"}
    assert both.ours.base_decoder.fit_levels.plan.fits


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_with_packed_projections_they_are_exported_and_read_back(family, make_both, batch, tmp_path, hf):
    both = make_both(family)
    ours = adapt(both.ours, modules=["qkv_proj", "o_proj"])
    hf.save_adapter(ours, tmp_path / "usual")
    expected = ours(**batch).loss
    theirs = peft.PeftModel.from_pretrained(both.reference, tmp_path / "usual").eval()
    assert relative_distance(theirs(**batch).loss, expected) <= BOUND
    fresh = type(both.ours).from_pretrained(both.folder).eval()
    again = hf.load_adapter(fresh, tmp_path / "usual").eval()
    assert torch.equal(again(**batch).loss, expected)
    hf.save_adapter(again, tmp_path / "again")
    first, second = tensors(tmp_path / "usual"), tensors(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_adapters_of_the_router_train_too(make_both, batch):
    ours = adapt(make_both("qwen3_moe").ours, ["gate.weight"]).train()
    ours(**batch).loss.backward()
    trained = [p.grad for p in ours.parameters() if p.requires_grad]
    assert trained
    assert all(gradient.any() for gradient in trained)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_of_single_experts_are_converted_to_stacks(family, make_both, batch, tmp_path, hf):
    """transformers 4 had adapters for each expert.

    Loaders that would silently skip these raise an error that says what to do.
    """
    both = make_both(family)
    torch.manual_seed(3)
    stack = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}[family]
    names = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}[family]
    lone = {}
    for path, module in both.ours.named_modules():
        if isinstance(module, Experts):
            _, hidden, inner = module.down_proj.shape
            for expert in range(len(module.down_proj)):
                for name in names:
                    rows = (hidden, inner) if name == names[2] else (inner, hidden)
                    stem = f"base_model.model.{path.replace('mlp', stack)}.{expert}.{name}"
                    lone[f"{stem}.lora_A.weight"] = torch.randn(2, rows[1]) / 7
                    lone[f"{stem}.lora_B.weight"] = torch.randn(rows[0], 2) / 7
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = both.reference.get_submodule(f"model.layers.1.self_attn.{name}").weight.shape[0]
        stem = f"base_model.model.model.layers.1.self_attn.{name}"
        lone[f"{stem}.lora_A.weight"] = torch.randn(2, both.ours.config.hidden_size) / 7
        lone[f"{stem}.lora_B.weight"] = torch.randn(rows, 2) / 7
    targets = [*names, "layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path / "lone")
    save_file(lone, tmp_path / "lone" / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(both.reference, tmp_path / "lone").eval()
    expected, seen = theirs(**batch).loss, batch["attention_mask"].bool()
    ours = hf.load_adapter(both.ours, tmp_path / "lone").eval()
    assert relative_distance(ours(**batch).loss, expected) <= BOUND
    assert relative_distance(ours(**batch).logits[seen], theirs(**batch).logits[seen]) <= BOUND
    hf.save_adapter(ours, tmp_path / "again")
    fresh = type(both.ours).from_pretrained(both.folder).eval()
    assert relative_distance(fresh(**batch).logits[seen], theirs(**batch).logits[seen]) > 0.01
    again = hf.load_adapter(fresh, tmp_path / "again").eval()
    assert torch.equal(again(**batch).loss, ours(**batch).loss)
    fresh = type(both.ours).from_pretrained(both.folder)
    with pytest.raises(liger_models.CheckpointError, match=r"hf\.load_adapter reads it"):
        peft.PeftModel.from_pretrained(fresh, tmp_path / "lone")
    fresh = type(both.ours).from_pretrained(both.folder)
    with pytest.raises(liger_models.CheckpointError, match="differ in"):
        fresh.load_adapter(tmp_path / "lone")


def test_an_adapter_of_a_missing_module_is_an_error(make_both, tmp_path):
    both = make_both("qwen3_moe")
    adapt(both.reference).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace(".mlp.", ".feed_forward."): x for name, x in load_file(path).items()}, path)
    with pytest.raises(liger_models.CheckpointError, match="but this model does not"):
        peft.PeftModel.from_pretrained(both.ours, tmp_path / "adapter")


def test_adapters_for_only_some_experts_are_refused(make_both, tmp_path, hf):
    both = make_both("mixtral")
    stem = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w2"
    lone = {f"{stem}.lora_A.weight": torch.zeros(2, 80), f"{stem}.lora_B.weight": torch.zeros(48, 2)}
    peft.LoraConfig(r=2, target_modules=["w2"]).save_pretrained(tmp_path / "lone")
    save_file(lone, tmp_path / "lone" / "adapter_model.safetensors")
    with pytest.raises(liger_models.CheckpointError, match="has experts without a pair"):
        hf.load_adapter(both.ours, tmp_path / "lone")


def test_a_peft_that_exchanges_inputs_and_outputs_is_refused(make_both, monkeypatch):
    monkeypatch.setattr(peft, "__version__", "0.18.0")
    with pytest.raises(ValueError, match=r"expected 0\.19\.1 or newer"):
        adapt(make_both("qwen3_moe").ours)


def test_adapters_of_biases_in_another_order_are_refused(make_both):
    with pytest.raises(ValueError, match="adapt the matrices"):
        adapt(make_both("gpt_oss").ours, ["experts.gate_up_proj_bias"])


def test_shared_experts_are_not_saved_under_names_that_peft_resolves_to_stacks(
    make_both, batch, tmp_path, hf
):
    """PEFT would look for adapters of shared experts in the stacks. Files saved by PEFT can be read back."""
    both = make_both("deepseek_v3")
    config = peft.LoraConfig(r=3, target_modules=["gate_up_proj", "o_proj"], init_lora_weights=False)
    ours = peft.get_peft_model(both.ours, config).eval()
    with pytest.raises(liger_models.CheckpointError, match=r"gate_proj, up_proj\).*model\.save_pretrained"):
        hf.save_adapter(ours, tmp_path / "usual")
    assert not (tmp_path / "usual").exists()
    ours.save_pretrained(tmp_path / "packed")
    fresh = type(both.ours).from_pretrained(both.folder)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "packed").eval()
    assert torch.equal(again(**batch).loss, ours(**batch).loss)
    config = peft.LoraConfig(r=3, target_modules=["latent_proj", "o_proj"], init_lora_weights=False)
    ours = peft.get_peft_model(type(both.ours).from_pretrained(both.folder), config).eval()
    hf.save_adapter(ours, tmp_path / "usual")
    theirs = peft.PeftModel.from_pretrained(both.reference, tmp_path / "usual").eval()
    assert relative_distance(theirs(**batch).loss, ours(**batch).loss) <= BOUND


def test_a_warning_names_linear_layers_that_peft_mistakes_for_stacks_and_says_how_to_adapt_them(
    make_both, batch, tmp_path, hf
):
    """PEFT silently skips dense MLPs and shared experts, in transformers' own models as in ours."""
    both = make_both("deepseek_v3", projections="split")
    settings = {"r": 3, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    with pytest.warns(UserWarning, match="9 linear layers .*have no adapter") as warned:
        adapted = peft.get_peft_model(both.ours, peft.LoraConfig(**settings))
    assert any("'shared_experts.up_proj.weight'" in str(warning.message) for warning in warned)
    adapted.unload()

    places = [
        f"{owner}.{name}_proj" for owner in ("shared_experts", "0.mlp") for name in ("gate", "up", "down")
    ]
    parameters = [f"{place}.weight" for place in places]
    config = peft.LoraConfig(**settings, target_parameters=parameters)
    theirs = peft.get_peft_model(both.reference, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    seen = batch["attention_mask"].bool()
    expected = theirs(**batch).logits[seen]
    again = type(both.ours).from_pretrained(both.folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*have no adapter")
        ours = peft.PeftModel.from_pretrained(again, tmp_path / "adapter", is_trainable=True).eval()
    assert relative_distance(ours(**batch).logits[seen], expected) <= BOUND
    for projections in ("split", "fused"):
        hf.register(projections)
        fresh = transformers.AutoModelForCausalLM.from_pretrained(both.folder)
        ours = hf.load_adapter(fresh, tmp_path / "adapter").eval()
        assert relative_distance(ours(**batch).logits[seen], expected) <= BOUND


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_sharded_models_have_the_gradients_of_one_process(make_both, batch, tmp_path):
    both = make_both("qwen3_moe", projections="split")
    adapted = adapt(both.ours, modules=["q_proj", "o_proj"]).train()
    adapted.save_pretrained(tmp_path / "adapter")
    both.folder.rename(tmp_path / "model")
    rows = {name: batch[name] for name in ("input_ids", "labels")}
    torch.save(rows, tmp_path / "batch.pt")
    losses = []
    for rank in range(2):
        losses.append(adapted(**{name: part.chunk(2)[rank] for name, part in rows.items()}).loss)
    (sum(losses) / 2).backward()
    expected = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    for rank, found in enumerate(run_ranks(Path(__file__).with_name("lora_rank.py"), tmp_path)):
        assert relative_distance(found["loss"], losses[rank]) <= BOUND
        assert found["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            assert relative_distance(found["gradients"][name], gradient) <= BOUND, name


def as_unsloth_writes(source, folder, experts, marks):
    """Rewrite PEFT's files as unsloth writes them: columns of lora_B grouped by expert, and its own keys."""
    config = json.loads((source / "adapter_config.json").read_text())
    by_expert = {
        name: x.unflatten(1, (-1, experts)).transpose(1, 2).flatten(1).contiguous() if "lora_B" in name else x
        for name, x in tensors(source).items()
    }
    folder.mkdir()
    save_file(by_expert, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | marks))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_that_unsloth_wrote_are_read_in_their_order_or_refused(
    family, make_both, batch, tmp_path, hf
):
    both = make_both(family)
    expected = adapt(both.reference)
    expected.save_pretrained(tmp_path / "peft")
    expected = expected(**batch).loss
    experts = next(len(m.down_proj) for m in both.ours.modules() if isinstance(m, Experts))
    unsloth = {"auto_mapping": {"base_model_class": "X", "parent_library": "x", "unsloth_fixed": True}}
    marked = {**unsloth, "lora_B_layout": "grouped_by_expert"}
    for name, marks in {"marked": marked, "unmarked": unsloth, "odd": {"lora_B_layout": "other"}}.items():
        as_unsloth_writes(tmp_path / "peft", tmp_path / name, experts, marks)

    def fresh():
        return type(both.ours).from_pretrained(both.folder).eval()

    loaded = hf.load_adapter(fresh(), tmp_path / "marked").eval()
    assert relative_distance(loaded(**batch).loss, expected) <= BOUND
    for folder in ("unmarked", "odd"):
        with pytest.raises(liger_models.CheckpointError, match=r"lora_B_layout=.*'grouped_by_expert'"):
            hf.load_adapter(fresh(), tmp_path / folder)
    for load in (peft.PeftModel.from_pretrained, type(both.ours).load_adapter):
        with pytest.raises(liger_models.CheckpointError, match=r"unsloth.*hf\.load_adapter"):
            load(fresh(), tmp_path / "unmarked")

    # Written by unsloth since version 2026.9.6.
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    newer = json.dumps(config | unsloth | {"lora_B_layout": "rank_major"})
    (tmp_path / "peft" / "adapter_config.json").write_text(newer)
    loaded = hf.load_adapter(fresh(), tmp_path / "peft").eval()
    assert relative_distance(loaded(**batch).loss, expected) <= BOUND
