"""PEFT's adapters on each part of a vision-language model match transformers' own in every number and file.

This also holds on quantised weights.
"""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from pairs import beyond_bound, relative_distance
from randomised import randomise_trained
from scenes import DOCUMENTS

from liger_models.convert.errors import CheckpointError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PARTS = {
    "language": r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    "tower": r".*(visual\.blocks.*\.(qkv|attn\.proj|up_proj)|vision_tower.*\.(q_proj|out_proj|fc1))",
    "all": "all-linear",
}
SEVERAL = ["qwen2_5_vl", "gemma3", "mllama", "aria", "muse_glimmer", "step3p7", "minimax_m3_vl", "molmo2"]


@pytest.fixture
def projections():
    return "split"


def compare(theirs, ours, call):
    expected, found = theirs(**call, use_cache=False).loss, ours(**call).loss
    distances = {"loss": relative_distance(found, expected)}
    expected.backward()
    found.backward()
    of_theirs = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None and "lora_" in n}
    of_ours = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None and "lora_" in n}
    assert of_theirs.keys() == of_ours.keys()
    assert of_theirs
    assert not beyond_bound(
        distances | {n: relative_distance(of_ours[n], gradient) for n, gradient in of_theirs.items()}
    )


@pytest.mark.supports("vision-language models", "PEFT, LoRA on each part")
@pytest.mark.parametrize(
    ("family", "part"),
    [("qwen2_5_vl", "language"), ("qwen2_5_vl", "tower"), *((name, "all") for name in SEVERAL)],
)
def test_adapters_match_transformers_own_model(family, part, pair, both, tmp_path):
    theirs, ours = both
    call = pair.scene(*DOCUMENTS.values())
    config = peft.LoraConfig(r=3, target_modules=PARTS[part], exclude_modules=r".*patch_embed.*")
    theirs = randomise_trained(peft.get_peft_model(theirs, config))
    theirs.save_pretrained(tmp_path / "adapter")
    adapted = peft.get_peft_model(copy.deepcopy(ours), config)
    assert {n for n, _ in adapted.named_parameters() if "lora_" in n} == {
        n for n, _ in theirs.named_parameters() if "lora_" in n
    }
    ours = peft.PeftModel.from_pretrained(ours, tmp_path / "adapter", is_trainable=True).train()
    compare(theirs, ours, call)
    ours.save_pretrained(tmp_path / "again")
    for name in ("adapter_model.safetensors",):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


@pytest.mark.parametrize("family", ["molmo2"])
def test_an_adapter_of_patch_embeddings_is_refused(family, both, hf, tmp_path):
    """They are linear layers in transformers, whose `all-linear` includes them."""
    theirs, ours = both
    peft.get_peft_model(theirs, peft.LoraConfig(r=3, target_modules="all-linear")).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"patch_embedding: .* takes no adapter here; merge"):
        hf.load_adapter(ours, tmp_path)


@pytest.mark.parametrize("family", ["nemotron_h_omni"])
def test_an_adapter_of_a_head_that_transformers_does_not_know_as_one_loads(family, pair, both, hf, tmp_path):
    """PEFT writes no weights of the head itself, and takes it for a layer that `all-linear` means."""
    theirs, ours = both
    call = pair.scene(*DOCUMENTS.values())
    config = peft.LoraConfig(r=3, target_modules="all-linear", exclude_modules=r".*patch_projection.*")
    theirs = randomise_trained(peft.get_peft_model(theirs, config))
    theirs.save_pretrained(tmp_path / "adapter")
    assert any("lm_head" in name for name, p in theirs.named_parameters() if p.requires_grad)
    compare(theirs, hf.load_adapter(ours, tmp_path / "adapter", is_trainable=True).train(), call)


@pytest.mark.parametrize("family", ["kimi_k25"])
def test_layers_that_are_several_in_transformers_have_no_adapters(family, pair, both, tmp_path):
    """Others match: queries, keys and values of Kimi K2.5's encoder are one layer in files and here."""
    theirs, ours = both
    call = pair.scene(*DOCUMENTS.values())
    settings = {"r": 3, "target_modules": "all-linear"}
    with pytest.raises(ValueError, match=r"q_proj, k_proj, v_proj in .* exclude_modules=r'\.\*\\\.qkv_proj'"):
        peft.get_peft_model(copy.deepcopy(ours), peft.LoraConfig(**settings))
    whole = peft.get_peft_model(copy.deepcopy(theirs), peft.LoraConfig(**settings))
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"q_proj, k_proj, v_proj are one layer, qkv_proj: merge"):
        peft.PeftModel.from_pretrained(copy.deepcopy(ours), tmp_path / "whole")
    rest = peft.LoraConfig(**settings, exclude_modules=r".*(patch_embed|vision_tower.*(qkv|q|k|v)_proj).*")
    theirs = randomise_trained(peft.get_peft_model(theirs, rest))
    theirs.save_pretrained(tmp_path / "rest")
    compare(theirs, peft.PeftModel.from_pretrained(ours, tmp_path / "rest", is_trainable=True).train(), call)


@pytest.mark.parametrize(
    ("family", "part"),
    [("qwen2_5_vl", "visual"), ("llama4", "multi_modal_projector"), ("mistral3", "patch_merger")],
)
def test_a_part_that_peft_trains_in_full_is_the_one_that_runs(family, part, pair, both, tmp_path):
    """The model runs the copy in PEFT's wrapper, even if its code refers to modules in or above the part."""
    call = pair.scene(*DOCUMENTS.values())
    config = peft.LoraConfig(r=3, target_modules=r".*language_model.*q_proj", modules_to_save=[part])
    theirs, ours = (randomise_trained(peft.get_peft_model(model, config)) for model in both)
    outputs = theirs(**call, use_cache=False).loss, ours(**call).loss
    for loss in outputs:
        loss.backward()
    gradients = [
        {n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in (theirs, ours)
    ]
    assert gradients[0].keys() == gradients[1].keys()
    assert any(part in name for name in gradients[0])
    distances = {n: relative_distance(gradients[1][n], g, 1e-2) for n, g in gradients[0].items()}
    assert not beyond_bound({"loss": relative_distance(outputs[1], outputs[0]), **distances})
    sent = {name: tensor.clone() for name, tensor in ours.base_model.model.checkpoint_tensors()}
    ours.merge_and_unload().save_pretrained(tmp_path / "merged")
    written = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    assert sent.keys() == written.keys()
    assert not beyond_bound({name: relative_distance(sent[name], x) for name, x in written.items()})
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").train()
    assert not beyond_bound({"merged": relative_distance(again(**call).loss, outputs[0])})


@pytest.mark.parametrize("family", ["gemma4"])
def test_merged_weights_have_the_names_of_transformers_own_model(family, both, tmp_path):
    """Gemma 4's clipped projections are layers inside other layers."""
    from safetensors import safe_open

    _, ours = both
    config = peft.LoraConfig(r=3, target_modules="all-linear", exclude_modules=r".*patch_embed.*")
    peft.get_peft_model(ours, config).merge_and_unload().save_pretrained(tmp_path / "merged")
    files = (tmp_path / folder / "model.safetensors" for folder in ("theirs", "merged"))
    names = [set(safe_open(file, "pt").keys()) for file in files]
    assert names[0] == names[1]


@pytest.mark.supports("vision-language models", "bitsandbytes, QLoRA on tower and language model")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_adapters_on_quantised_weights_match_transformers_own(family, pair, both, hf, tmp_path):
    pytest.importorskip("bitsandbytes")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"quantization_config": settings, "dtype": torch.float32, "device_map": {"": "cpu"}}
    auto = transformers.AutoModelForImageTextToText
    ours = auto.from_pretrained(tmp_path / "theirs", **options).train()
    hf.unregister()
    theirs = auto.from_pretrained(tmp_path / "theirs", attn_implementation="eager", **options).train()
    hf.register("split")
    quantised = [
        {n for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"} for model in (theirs, ours)
    ]
    assert quantised[0] == quantised[1]
    assert any("vis" in name for name in quantised[0])
    assert any("language_model" in name for name in quantised[0])
    config = peft.LoraConfig(r=3, target_modules="all-linear", exclude_modules=r".*patch_embed.*")
    theirs = randomise_trained(peft.get_peft_model(theirs, config))
    theirs.save_pretrained(tmp_path / "adapter")
    ours = peft.PeftModel.from_pretrained(ours, tmp_path / "adapter", is_trainable=True).train()
    compare(theirs, ours, pair.scene(*DOCUMENTS.values()))
