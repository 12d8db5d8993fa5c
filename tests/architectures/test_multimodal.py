"""The text part of a multimodal checkpoint loads on request: its logits equal the multimodal reference's on
text, and it is saved as a checkpoint of its own.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_timm import fake_timm
from older import class_of_transformers
from pairs import randomise, reference_class, relative_distance
from safetensors.torch import load_file, save_file
from text_parts import CASES, TEXT

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.architectures.registry.multimodal import MULTIMODAL, text_config
from liger_models.architectures.registry.unsupported import MISSING
from liger_models.cli import main
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError


def test_every_family_in_the_table_is_tested():
    elsewhere = set(list_architectures(vision=True, audio=True))  # tested in tests/vision and tests/audio
    elsewhere |= {kind for kind, family in MULTIMODAL.items() if family.within}  # tested below
    assert {case[1]["model_type"] for case in CASES.values()} | elsewhere == MULTIMODAL.keys() | elsewhere


@pytest.fixture(scope="session")
def written_once(tmp_path_factory):
    """A factory like `write`, which writes each checkpoint once: tests leave it as it is."""
    return functools.cache(lambda case: write(case, tmp_path_factory))


@pytest.fixture(params=CASES)
def written(request, written_once):
    """The reference, and the folder of its checkpoint."""
    return written_once(request.param)


def write(case, tmp_path_factory):
    name, config = CASES[case]
    model_class = class_of_transformers(name)
    reference_config = model_class.config_class(**copy.deepcopy(config))
    reference_config._attn_implementation = "eager"
    torch.manual_seed(0)
    with fake_timm():
        reference = model_class(reference_config)
    randomise(reference, torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("multimodal") / case
    reference.save_pretrained(folder)
    if case == "kimi_k25":  # transformers also renames the text's layers, unlike those of the release
        file, layers = folder / "model.safetensors", ".model.layers."
        named = {name.replace(".model.blocks.", layers): x for name, x in load_file(file).items()}
        save_file(named, file, {"format": "pt"})
    return reference, folder


def load(folder, **options):
    with pytest.warns(UserWarning, match="only the text part"):
        return liger_models.from_hub(folder, text_only=True, **options)


def logits_of(model):
    ids = torch.randint(0, 131, (2, 19), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(input_ids=ids).logits


def rewrite(folder: Path, to: Path, rename=lambda name: name, **config) -> Path:
    """Write the checkpoint with other tensor names and other keys of its config; `...` removes a key."""
    to.mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, to / "model.safetensors")
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    raw = {key: value for key, value in raw.items() if value is not ...}
    (to / "config.json").write_text(json.dumps(raw))
    return to


def test_the_text_part_gives_the_references_logits(written, failures):
    reference, folder = written
    model = load(folder)
    assert not failures({"logits": relative_distance(logits_of(model), logits_of(reference))})
    names = load_file(folder / "model.safetensors").keys()
    own = set(model.left_out) - set(unread_by_text(folder))
    assert own < names
    assert {name.removeprefix("model.").split(".")[0] for name in own} <= {
        "vision_tower",
        "audio_tower",
        "vision_model",
        "multi_modal_projector",
        "embed_vision",
        "embed_audio",
        "visual",
        "vision_embedder",
        "mlp1",
        "connector",
        "projector",
        "encoder",
        "visual_embeddings_table",
        "image_newline",
        "merger",
        "mm_projector",
        "patch_merge_mlp",
    }


def unread_by_text(folder):
    """Llama 3.2 Vision has layers that read images, and ids that text does not use."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    layers = tuple(f"language_model.model.layers.{i}." for i in text.get("cross_attention_layers", ()))
    names = [name for name in load_file(folder / "model.safetensors") if name.startswith(layers)]
    return [*names, *(["language_model.model.embed_tokens.weight[131:]"] if layers else [])]


def test_layers_that_read_images_are_left_out_and_named(tmp_path_factory):
    _, folder = write("mllama", tmp_path_factory)
    with pytest.warns(UserWarning, match=r"left out.*27 of language_model"):
        model = liger_models.from_hub(folder, text_only=True)
    assert len(unread_by_text(folder)) == 2 * 13 + 1
    assert set(unread_by_text(folder)) < set(model.left_out)
    assert (len(model.layers), len(model.embed_tokens.weight)) == (3, 131)


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ("Llama-3.2-11B-Vision-Instruct", "Llama-3.1-8B"),
        ("Llama-3.2-90B-Vision-Instruct", "Llama-3.1-70B"),
    ],
)
def test_the_text_of_llama_3_2_vision_is_llama_3_1(vision, text):
    folder = Path(__file__).parent / "published"
    raw, alone = (json.loads((folder / f"{name}.json").read_text()) for name in (vision, text))
    model = liger_models.from_config(raw["config"], device="meta", text_only=True)
    assert model.num_parameters() == alone["parameters"]
    expected = liger_models.from_config(alone["config"], device="meta").spec
    assert replace(model.spec, padding_idx=expected.padding_idx) == expected


def test_keys_that_no_layer_reads_are_left_out_and_named(tmp_path_factory, tmp_path, failures):
    """Published checkpoints of Gemma 4's small models have them in layers that read the keys of others."""
    reference, folder = write("gemma4_small", tmp_path_factory)
    tensors = load_file(folder / "model.safetensors")
    unread = [f"model.language_model.layers.{i}.self_attn.k_proj.weight" for i in (2, 3)]
    rewrite(folder, tmp_path / "published")
    save_file(
        {**tensors, **{name: torch.rand(2, 3) for name in unread}},
        tmp_path / "published" / "model.safetensors",
    )
    with pytest.warns(UserWarning, match=r"left out.*2 of layers"):
        model = liger_models.from_hub(tmp_path / "published", text_only=True)
    assert {name.replace("model.", "model.language_model.") for name in model.left_out} >= set(unread)
    assert not failures({"logits": relative_distance(logits_of(model), logits_of(reference))})


def test_the_text_part_is_saved_as_a_checkpoint_of_its_own(written, failures, tmp_path):
    _, folder = written
    model = load(folder)
    model.save_pretrained(tmp_path / "text")
    again = liger_models.from_hub(tmp_path / "text")
    assert torch.equal(logits_of(again), logits_of(model))
    assert again.spec == model.spec
    read = reference_class(model.architecture).from_pretrained(tmp_path / "text", attn_implementation="eager")
    assert not failures({"logits": relative_distance(logits_of(read), logits_of(model))})


def in_memory(name: str) -> str:
    """The name in newer checkpoints of a tensor in older ones."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    if name.startswith(("vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.")):
        return f"model.{name}"
    towers = (
        "audio_tower.",
        "visual.",
        "vision_tower.",
        "vision_model.",
        "embed_vision.",
        "embed_audio.",
        "vision_embedder.",
        "connector.",
        "merger.",
    )
    towers += (
        "projector.",
        "multi_modal_projector.",
        "mm_projector.",
        "visual_embeddings_table.",
        "text_model.",
    )
    if name.startswith("model.") and not name.startswith(
        tuple(f"model.{part}" for part in ("language_model.", *towers))
    ):
        return "model.language_model." + name.removeprefix("model.")
    return name


def test_newer_tensor_names_are_read_too(written, tmp_path):
    _, folder = written
    assert torch.equal(logits_of(load(rewrite(folder, tmp_path / "new", in_memory))), logits_of(load(folder)))


def test_a_head_in_the_files_overrides_the_config(written, tmp_path):
    _, folder = written
    names = load_file(folder / "model.safetensors").keys()
    has_head = any("lm_head" in name for name in names)
    said = load(rewrite(folder, tmp_path / "said", tie_word_embeddings=True))
    assert said.spec.tie_word_embeddings != has_head
    assert load(folder).spec.tie_word_embeddings != has_head


def test_without_text_only_the_checkpoint_is_refused_with_a_hint(written):
    _, folder = written
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    if kind in list_architectures(vision=True, audio=True):
        return  # tested in tests/vision and tests/audio
    with pytest.raises(UnsupportedModelError, match=r"from_hub\(\.\.\., text_only=True\).*rest needs \w+"):
        liger_models.from_hub(folder)


@pytest.mark.parametrize("where", ["outer", "inner"])
def test_an_unknown_key_is_named(where, written, tmp_path):
    _, folder = written
    text = json.loads((folder / "config.json").read_text())["text_config"]
    odd = {"attention_is_odd": 3}
    changes = odd if where == "outer" else {"text_config": {**text, **odd}}
    with pytest.raises(ConfigError, match="attention_is_odd"):
        liger_models.from_hub(rewrite(folder, tmp_path / "odd", **changes), text_only=True)


def test_an_unknown_tensor_is_named(written, tmp_path):
    _, folder = written
    to = rewrite(folder, tmp_path / "odd")
    tensors = load_file(to / "model.safetensors")
    save_file({**tensors, "speech_tower.conv.weight": torch.rand(3)}, to / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"speech_tower\.conv\.weight"):
        liger_models.from_hub(to, text_only=True)


def test_an_older_flat_config_gives_the_same_model(tmp_path):
    """Qwen2.5-VL once had its text keys at the top level."""
    config = CASES["qwen2_5_vl"][1]
    flat = {**config["text_config"], "vision_config": {}, "model_type": "qwen2_5_vl", "rope_theta": 500.0}
    del flat["rope_parameters"]
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 2]}
    assert text_spec(flat) == text_spec(config)


def test_a_flat_config_with_keys_of_other_names_gives_the_same_model():
    """As of PaddleOCR-VL's released files."""
    path = Path(__file__).parent / "published" / "PaddleOCR-VL.json"
    config = json.loads(path.read_text())["config"]
    for bias in (False, True):
        config["text_config"]["use_bias"] = bias
        spec = text_spec(config)
        assert (spec.blocks[0].mixer.o_bias, spec.blocks[0].mlp.bias) == (bias, bias)
        rest = {key: value for key, value in config.items() if key != "text_config"}
        assert text_spec({**config["text_config"], **rest}) == spec


@pytest.mark.parametrize("case", CASES)
def test_missing_keys_of_a_text_config_have_the_references_defaults(case):
    """Published text configs state little more than the differences from a class's defaults."""
    name, config = CASES[case]
    kind = config["text_config"].get("model_type")
    kept = {"model_type": kind} if kind else SIZES
    if kind == "gemma4_text":
        kept["hidden_size_per_layer_input"] = 0  # the default is not supported
    if kind == "minimax_m3_vl_text":  # the default of half a head is that of a key without effect
        kept["rope_parameters"] = {"partial_rotary_factor": 0.5}
    if kind == "qwen4_exp_text":  # by default there is no indexer, which layers with attention need
        kept |= {f"indexer_{name}": 16 for name in ("n_heads", "compress_ratio", "budget")}
        kept |= {"indexer_kv_heads": 1, "indexer_head_dim": 256}
    if kind == "qwen3_omni_moe_text":
        kept["head_dim"] = 64  # by default 2048 / 28
    if kind == "cohere_compass_text":  # has no default
        kept["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}
    towers = {key: config[key] for key in ("vision_config", "audio_config") if key in config}
    raw = {"model_type": config["model_type"], "text_config": kept, **towers}
    config_class = class_of_transformers(name).config_class
    assert text_spec(raw) == text_spec(config_class(**copy.deepcopy(raw)).to_dict())


SIZES = {
    "vocab_size": 131,
    "hidden_size": 512,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}


def text_spec(raw):
    text = HFConfig.load(text_config(raw, "config"))
    return find_architecture(text.model_type).spec(text)


def test_a_text_part_of_another_family_is_refused():
    raw = {**CASES["llava"][1], "text_config": {**TEXT, "model_type": "mamba"}}
    with pytest.raises(UnsupportedModelError, match=r"text part of this 'llava' checkpoint.*'mamba'"):
        text_config(raw, "config")


@pytest.mark.parametrize(
    ("model_type", "part"),
    [("rwkv", "recurrence"), ("zamba", "state-space")],
)
def test_a_known_unsupported_family_is_refused_with_the_missing_part(model_type, part):
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is known but not supported.*{part}"):
        liger_models.from_config({"model_type": model_type})


def test_no_family_is_both_supported_and_unsupported():
    names = [*liger_models.list_architectures(), *MULTIMODAL, *MISSING]
    assert len(names) == len(set(names))


def test_the_command_line_takes_the_text_part_too(written, tmp_path):
    _, folder = written
    with pytest.warns(UserWarning, match="only the text part"):
        assert main(["export", str(folder), str(tmp_path / "text"), "--text-only"]) == 0
    again = liger_models.from_hub(tmp_path / "text")
    assert torch.equal(logits_of(again), logits_of(load(folder)))
    assert liger_models.from_config(folder, device="meta", text_only=True).spec == again.spec


@pytest.mark.parametrize("case", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_the_text_part_of_a_model_that_speaks_is_its_thinkers(case, written_once, tmp_path):
    """As in released checkpoints, whose other tensors are left out."""
    _, folder = written_once(case)
    raw = json.loads((folder / "config.json").read_text())
    to, whole = tmp_path / "whole", case.removesuffix("_thinker")
    rewrite(folder, to, lambda name: f"thinker.{name}", **dict.fromkeys(raw, ...))
    config = {"model_type": whole, "thinker_config": raw, "talker_config": {"hidden_size": 3}}
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(to / "model.safetensors")
    save_file({**tensors, "talker.model.norm.weight": torch.rand(3)}, to / "model.safetensors")
    model = load(to)
    assert "talker.model.norm.weight" in model.left_out
    assert torch.equal(logits_of(model), logits_of(load(folder)))
    (to / "config.json").write_text(json.dumps({"model_type": whole}))
    with pytest.raises(ConfigError, match="thinker_config must be an object, found None"):
        liger_models.from_hub(to, text_only=True)
