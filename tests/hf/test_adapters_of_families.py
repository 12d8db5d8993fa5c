"""Adapters of every family are interchangeable with PEFT's on transformers' own model."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from randomised import randomise_trained
from safetensors.torch import load_file

import liger_models.hf
from liger_models.architectures import find_architecture, list_architectures

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.randint(3, 131, (1, 7), generator=torch.Generator().manual_seed(0))
LINEAR = torch.nn.Linear, pytest.importorskip("transformers.pytorch_utils").Conv1D
REFUSED = "falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"  # _check_lora_target_modules_mamba
PASSED_BY = (
    "falcon_mamba",
    "jamba",
    "mamba",
)  # transformers multiplies by dt_proj's weight, without its adapter


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def tensors(folder):
    return load_file(folder / "adapter_model.safetensors")


def layers(model):
    """Return the linear layers, also those of GPT-2 with transposed weights, without the head, routers, which
    are parameters in ours, those that PEFT refuses in models of Mamba's types, those whose adapters the
    reference passes by, those whose weights several layers share (test_shared_weights.py), and DeepSeek-V4's
    projection of groups, whose adapter PEFT gives the shape of a plain one's and cannot run.
    """
    found = {path for path, module in model.named_modules() if isinstance(module, LINEAR)}
    other = ["lm_head", ".router", ".router.proj", ".router.layer", ".router.classifier", ".gate.wg"]
    other += [".o_a_proj"]
    other += [".out_proj"] if model.config.model_type in REFUSED else []
    other += [".dt_proj"] if model.config.model_type in PASSED_BY else []
    return {path for path in found if not path.endswith(tuple(other)) and ".shared_transformer." not in path}


@pytest.mark.supports("PEFT", "every family under the names of transformers' own model")
@pytest.mark.of_layers("names")
@pytest.mark.parametrize("family", list_architectures())
def test_adapters_of_every_family_match_the_reference(family, make_both, tmp_path):
    both = make_both(family, projections="split")
    own = dict(both.ours.named_modules())  # norms per head are one module in the reference
    norms = [
        path
        for path, module in both.reference.named_modules()
        if "Norm" in type(module).__name__ and module._parameters and path in own
    ]  # none in OLMo
    stacks = {name for name, _ in both.reference.named_parameters() if name.endswith("experts.down_proj")}
    settings = {"r": 3, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(
        **settings,
        target_modules=sorted(layers(both.reference)),
        target_parameters=sorted(stacks),
        modules_to_save=norms[:1],
        rank_pattern={"o_proj": 2},
    )
    theirs = randomise_trained(peft.get_peft_model(both.reference, config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    expected, without = logits(theirs), logits(both.ours)
    ours = peft.PeftModel.from_pretrained(both.ours, tmp_path / "theirs").eval()
    assert relative_distance(logits(ours), expected) <= BOUND < relative_distance(without, expected)
    ours.save_pretrained(tmp_path / "ours")
    first, second = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize("family", list_architectures())
def test_adapters_on_packed_projections_match_the_reference(family, make_both, hf, tmp_path):
    """With DoRA, except on experts: PEFT would map their old names to the stacks, and with them a gate of
    attention that has the name of theirs. Without that gate, the keys of a compressor that are packed with it
    have no adapter either: DoRA adapts all parts of a packed projection or none.
    """
    both = make_both(family)
    stacks = any(name.endswith("experts.down_proj") for name, _ in both.reference.named_parameters())
    old = re.compile(r"\.mlps?\.|\.self_attn\..*\b(gate_proj|compressor\.(indexer\.)?kv_proj)$")
    targets = sorted(path for path in layers(both.reference) if not (stacks and old.search(path)))
    settings = {"r": 3, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**settings, target_modules=targets, use_dora=True)
    theirs = randomise_trained(peft.get_peft_model(both.reference, config)).eval()
    theirs.save_pretrained(tmp_path / "dora")
    expected = logits(theirs)
    ours = hf.load_adapter(both.ours, tmp_path / "dora").eval()
    assert relative_distance(logits(ours), expected) <= BOUND
    hf.save_adapter(ours, tmp_path / "packed")
    again = peft.PeftModel.from_pretrained(theirs.unload(), tmp_path / "packed").eval()
    assert relative_distance(logits(again), expected) <= BOUND


@pytest.mark.parametrize("family", sorted(set(REFUSED) & set(list_architectures())))
def test_output_projections_of_state_space_layers_have_adapters(family, make_both, hf, tmp_path):
    """Which PEFT refuses, because transformers' fused kernel passes them by."""
    both = make_both(family)
    without, other = logits(both.ours), type(both.ours).from_pretrained(both.folder).eval()
    targets = ["in_proj", "out_proj", *(["x_proj", "dt_proj"] if family in PASSED_BY else [])]
    config = peft.LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        peft.get_peft_model(other, config)
    adapted = randomise_trained(hf.get_peft_model(both.ours, config)).eval()
    assert adapted.config is both.ours.config
    assert both.ours.config.model_type == family
    found = logits(adapted)
    assert relative_distance(without, found) > BOUND
    hf.save_adapter(adapted, tmp_path / "adapter")
    adapted_layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors(tmp_path / "adapter")}
    assert adapted_layers == set(targets)
    other = type(both.ours).from_pretrained(both.folder)
    again = hf.load_adapter(other, tmp_path / "adapter").eval()
    assert relative_distance(logits(again), found) <= BOUND
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    hf.unregister()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is type(both.reference)
    assert relative_distance(logits(merged), found) <= BOUND


@pytest.mark.parametrize("family", ["gemma4_text", "hunyuan_v1_moe"])
def test_routers_that_are_linear_layers_in_transformers_can_be_adapted(family, make_both, hf, tmp_path):
    """The adapter covers all linear layers of the reference, in some families including experts."""
    both = make_both(family)
    config = peft.LoraConfig(r=3, init_lora_weights=False, task_type="CAUSAL_LM", target_modules="all-linear")
    theirs = randomise_trained(peft.get_peft_model(both.reference, config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    assert any(".proj.lora_A" in name or ".wg.lora_A" in name for name in tensors(tmp_path / "theirs"))
    expected = logits(theirs)
    ours = hf.load_adapter(both.ours, tmp_path / "theirs").eval()
    assert relative_distance(logits(ours), expected) <= BOUND
    hf.save_adapter(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(theirs.unload(), tmp_path / "ours").eval()
    assert relative_distance(logits(again), expected) <= BOUND


def test_a_name_of_another_module_in_the_reference_is_refused(make_both):
    both = make_both("glm4")
    norms = ["post_attention_layernorm"]  # after attention in our model, before the MLP in the reference
    with pytest.raises(ValueError, match="names a different module"):
        peft.get_peft_model(both.ours, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=norms))


def test_copies_of_a_model_with_renamed_modules_are_independent(make_both):
    ours = make_both("gemma4_text").ours
    expected, tensors = logits(ours), {name: x.clone() for name, x in ours.state_dict().items()}
    copies = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    for copied in copies:
        assert [type(m) for m in copied.modules()] == [type(m) for m in ours.modules()]
        found = copied.state_dict()
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], x) for name, x in tensors.items())
        # Not bit for bit: our tensors are in a mapped file, the copies are not, and on some CPUs the order of
        # sums in a matrix product depends on the alignment of its operands.
        assert relative_distance(logits(copied), expected) <= BOUND


def test_an_adapter_is_not_loaded_into_a_native_model(tmp_path):
    model = liger_models.from_config(find_architecture("llama").tiny, device="meta")
    with pytest.raises(TypeError, match=r"takes a model of liger_models\.hf.*from_hub"):
        liger_models.hf.load_adapter(model, tmp_path)
