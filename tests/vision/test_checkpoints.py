"""Checkpoints of vision-language families are loaded in full and saved byte for byte, in every known layout.

The reference can read our files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from pairs import beyond_bound, randomise, reference_class, relative_distance
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.layers.parts.embedder import embeds_ids
from liger_models.models import verification


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Function that returns the folder of a family's checkpoint, saved by the reference in several files."""
    made = {}

    def get(pair):
        name = pair.architecture.model_type
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoints") / name
            pair.reference.save_pretrained(made[name], max_shard_size=100_000)
        return made[name]

    return get


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.of_layers
def test_a_checkpoint_of_the_reference_is_saved_byte_for_byte_and_gives_its_logits(pair, written, tmp_path):
    folder = written(pair)
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = liger_models.from_hub(folder)
    model.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)
    batch, logits, _ = pair.probe
    with torch.no_grad():
        found = model(**batch, return_logits=True).logits
    assert not beyond_bound({"logits": relative_distance(found, logits)})


@pytest.mark.of_layers("tokens")
def test_the_reference_reads_what_we_write(pair, written, tmp_path):
    """The model is trained first, so that values differ from the loaded ones."""
    model = liger_models.from_hub(written(pair))
    randomise(model, torch.Generator().manual_seed(2))
    model.save_pretrained(tmp_path / "out")
    read = reference_class(pair.architecture).from_pretrained(tmp_path / "out", attn_implementation="eager")
    verification.mask_as_family(pair.architecture, read)
    batch = replace(pair, ours=model).batch()  # clear of ties of this model's routers
    with torch.no_grad():
        found = model(**batch, return_logits=True).logits
        expected = read(**batch, use_cache=False).logits
    assert not beyond_bound({"logits": relative_distance(found, expected)})


@pytest.mark.of_layers("tokens")
@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, id=f"{family}-{number}")
        for family in list_architectures(vision=True)
        for number in range(len(find_architecture(family).layouts))
    ],
)
def test_every_layout_is_saved_byte_for_byte(family, number, pair, written, tmp_path):
    """The files have one tensor each, in mixed dtypes."""
    model = liger_models.from_hub(written(pair))
    model.layout, model.source = pair.architecture.layouts[number], None
    model.save_pretrained(tmp_path / "as_laid_out")
    tensors = load_file(tmp_path / "as_laid_out" / "model.safetensors")
    wide = {name: x if x.dim() == 1 else x.bfloat16() for name, x in tensors.items()}
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "as_laid_out" / name).exists():
            (source / name).write_bytes((tmp_path / "as_laid_out" / name).read_bytes())
    index = {}
    for i, (name, tensor) in enumerate(wide.items()):
        index[name] = f"model-{i + 1:05}-of-{len(wide):05}.safetensors"
        save_file({name: tensor}, source / index[name], metadata={"format": "pt"})
    size = sum(x.numel() * x.element_size() for x in wide.values())
    whole = {"metadata": {"total_size": size}, "weight_map": index}
    (source / "model.safetensors.index.json").write_text(json.dumps(whole))
    again = liger_models.from_hub(source)
    again.save_pretrained(tmp_path / "out")
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    del wide[next(iter(wide))]
    (source / next(iter(index.values()))).unlink()
    with pytest.raises(CheckpointError):
        liger_models.from_hub(source)


@pytest.mark.of_layers("tokens")
def test_a_head_in_the_files_is_used_whatever_the_config_says(pair, written, tmp_path):
    """The reference does so too, since configs that omit the key often mean the opposite of its default."""
    source = tmp_path / "source"
    shutil.copytree(written(pair), source)
    tied = pair.ours.spec.tie_word_embeddings
    model = liger_models.from_hub(source)
    if tied:  # a separate head next to the embedding
        tensors = {name: tensor.contiguous() for name, tensor in model.checkpoint_tensors()}
        tensors[model.layout.name("lm_head.weight")] = torch.rand_like(model.embed_tokens.weight)
        for path in (*source.glob("*.safetensors"), source / "model.safetensors.index.json"):
            path.unlink()
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    again = liger_models.from_hub(source)
    assert not again.spec.tie_word_embeddings
    assert torch.equal(again.lm_head.weight, model.lm_head.weight) != tied
    again.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(source)


# These have no class in transformers.
WITHOUT_CLASS = (
    *("ernie4_5_vl_moe_text", "glm5_next_text", "mistral_large4_text", "molmo2_text", "muse_glimmer_text"),
    *("step3p5", "deepseek_ocr2_text"),
)


@pytest.mark.of_layers("tokens")
def test_the_text_part_can_be_loaded_as_a_language_model(pair, written):
    kind = pair.config.get("text_config", {}).get("model_type")
    if kind in WITHOUT_CLASS:
        with pytest.raises(UnsupportedModelError, match=f"no language model '{kind}'"):
            liger_models.from_hub(written(pair), text_only=True)
        return
    with pytest.warns(UserWarning, match="only the text part"):
        text = liger_models.from_hub(written(pair), text_only=True)
    assert text.spec.vision is None
    ids = pair.scene([19])["input_ids"]
    if embeds_ids(pair.ours.vision):  # ids of images and sounds are not text's
        ids = ids.clamp(max=pair.vision.projector.first_id - 1)
    with torch.no_grad():
        found, expected = text(ids).logits, pair.ours(ids).logits
    assert not beyond_bound({"logits": relative_distance(found, expected)})


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_an_unknown_key_of_either_part_is_refused_by_name(part, family):
    tiny = dict(find_architecture(family).tiny)
    if part in tiny:
        with pytest.raises(ConfigError, match="of_no_meaning"):
            liger_models.from_config({**tiny, part: {**tiny[part], "of_no_meaning": 2}})
    with pytest.raises(ConfigError, match="of_no_meaning"):
        liger_models.from_config({**tiny, "of_no_meaning": 2})


def test_verify_measures_gradients_that_are_rounding_by_their_terms():
    """A key's bias shifts all scores of a query equally, so its gradient is zero but for rounding."""
    weight = torch.full((4, 16), 0.5)  # whose terms have a norm of 1
    expected = {"k.weight": weight, "k.bias": torch.full((4,), 1e-8), "q.bias": torch.ones(4)}
    assert verification._least_size("k.bias", expected) == 1.0
    assert verification._least_size("q.bias", expected | {"q.weight": weight}) == 0.0  # as large as its terms
    assert verification._least_size("k.weight", expected) == 0.0
    assert verification.relative_distance(torch.zeros(4), expected["k.bias"], 1.0) == pytest.approx(2e-8)


def test_verify_compares_images_too(make_pair, tmp_path):
    make_pair("qwen2_5_vl").reference.save_pretrained(tmp_path)
    found = verification.verify_numbers(tmp_path)
    assert found.images == 3
    assert not found.too_far
    assert not found.lonely
    assert any("visual.patch_embed" in name for name in found.gradients)


def test_parts_that_compute_the_identity_may_be_left_out_of_a_checkpoint(make_pair, tmp_path):
    """Released checkpoints of Nemotron 3 Omni have neither the scales of branches nor the weight and bias of
    the last norm, which the reference sets to one and zero.
    """
    pair = make_pair("nemotron_h_omni")
    left_out = {
        name: p
        for name, p in pair.reference.named_parameters()
        if "layer_scale" in name or "vision_final_layernorm" in name
    }
    for name, p in left_out.items():
        torch.nn.init.constant_(p, float(not name.endswith("bias")))
    pair.reference.save_pretrained(tmp_path / "whole")
    source = tmp_path / "source"
    shutil.copytree(tmp_path / "whole", source)
    tensors = load_file(source / "model.safetensors")
    released = {n: x for n, x in tensors.items() if "layer_scale" not in n and "vision_final" not in n}
    assert len(tensors) - len(released) == len(left_out) == 6
    save_file(released, source / "model.safetensors", metadata={"format": "pt"})
    model = liger_models.from_hub(source)
    batch = pair.batch()
    with torch.no_grad():
        found = model(**batch, return_logits=True).logits
        expected = pair.reference(**batch, use_cache=False).logits
    assert not beyond_bound({"logits": relative_distance(found, expected)})
    model.save_pretrained(tmp_path / "out")
    assert files(tmp_path / "out") == files(source)
