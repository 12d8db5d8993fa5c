"""A plan counts the memory kept by an image encoder and its projector."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.kernels._dispatch import interpret
from liger_models.layers.memory import Step, StepMemory, shown_of_size
from liger_models.layers.memory.pictures import shown_by
from liger_models.layers.recompute import activation_memory
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.specs import SquarePictures, TiledVisionSpec, WindowedPictures
from liger_models.layers.vision.pictures import Pictures, PicturesInWindows
from liger_models.layers.vision.tiled_encoder import TiledImages


def pictures_for(spec):
    """Two pictures, of different sizes if the family supports that."""
    patches = spec.patches
    if isinstance(spec, TiledVisionSpec):
        pixels = torch.randn(1, 1, spec.tiles, patches.channels, spec.image_size, spec.image_size)
        return TiledImages(pixels, torch.ones(1, 1).long(), torch.ones(1, 1, spec.tiles).bool())
    if isinstance(spec.pictures, WindowedPictures):
        side = spec.pictures.side
        windows = torch.arange(40).view(10, 4)
        return PicturesInWindows(
            torch.randn(2 * side**2, patches.width), [(1, side, side)] * 2, windows, [10]
        )
    grids = [(1, 4, 6), (1, 8, 4)]
    if isinstance(spec.pictures, SquarePictures):
        grids = [(1, *[spec.pictures.size // patches.size] * 2)] * 2
    return Pictures(torch.randn(sum(h * w for _, h, w in grids), patches.width), grids, 2)


def kept_bytes(model, pictures) -> int:
    """Memory of a call of the vision part: kept by its layers, and saved by autograd around them."""
    old = {id(kept) for kept in gc.get_objects() if type(kept) is activation_memory._Kept}
    outside = []
    with interpret(), saved_tensors_hooks(lambda t: (outside.append(t), t)[1], lambda t: t):
        features = model.vision(pictures)
    inside = [k.tensor for k in gc.get_objects() if type(k) is activation_memory._Kept and id(k) not in old]
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*inside, *outside)}
    assert features[0].requires_grad
    return sum(size for place, size in storages.items() if place not in own)


def test_a_class_token_that_makes_a_feature_is_counted():
    tiny = find_architecture("llava").tiny
    counts = []
    for strategy in ("default", "full"):
        config = {**tiny, "vision_feature_select_strategy": strategy}
        model = liger_models.from_config(config, device="meta")
        shown = shown_of_size(model.spec.vision, 2, 7, 7)
        counts.append((shown.tokens, shown.features, StepMemory(model, Step(1, 64, shown=shown))._edges))
    (tokens, fewer, kept), (same, more, kept_with_it) = counts
    assert (tokens, fewer) == (same, more - 2)
    assert kept_with_it.projector > kept.projector


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("family", ["gemma3", "llava", "mllama", "molmo2"])
def test_the_plan_equals_the_bytes_that_autograd_saves(family, monkeypatch):
    tiny = dict(find_architecture(family).tiny)
    if family == "molmo2":  # on a CPU torch repeats shared keys
        heads = tiny["vision_config"]["num_attention_heads"]
        tiny["vision_config"] = {**tiny["vision_config"], "num_key_value_heads": heads}
    model = liger_models.from_config(tiny, device="cpu")
    pictures = pictures_for(model.spec.vision)
    memory = StepMemory(model, Step(1, 64, shown=shown_by(model.spec.vision, pictures)))
    edges = memory._edges
    planned = sum(costs.kept["lean"] for costs in memory.encoder) + edges.encoder + edges.projector
    # Layers use their own hooks only if none are set.
    monkeypatch.setattr(activation_memory, "_callers_hooks", lambda _: None)
    found = kept_bytes(model, pictures)
    # Some inputs are counted twice, by a norm and by the module before it; some statistics are not counted.
    assert 0.97 * planned <= found <= 1.003 * planned


QWEN = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"model_type": "qwen2_5_vl_vision", "depth": 4, "out_hidden_size": 2048},
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("qwen") / "config.json"
    file.write_text(json.dumps(QWEN))
    return str(file)


def test_the_command_counts_images_and_frozen_parts_keep_nothing(config_file, capsys):
    command = [
        "plan",
        config_file,
        "--gpu",
        "80GiB",
        "--seq-len",
        "8192",
        "--activation-memory",
        "lean",
        "--json",
    ]

    def planned(*more):
        assert main([*command, *more]) == 0
        return json.loads(capsys.readouterr().out)

    images = ("--images", "4", "--image-size", "1036x1036")
    without, shown = planned(), planned(*images)
    frozen = planned(*images, "--freeze", "vision")
    both = planned(*images, "--freeze", "vision,projector")
    assert shown["image_tokens"] == 4 * 37 * 37
    assert shown["encoder_levels"] == ["lean"] * 4
    assert frozen["encoder_levels"] == both["encoder_levels"] == []
    # At least each layer's input, and gate and up, for 4 images of 74 * 74 patches in bfloat16.
    least = 4 * 74**2 * 2 * 4 * (1280 + 2 * 3420)
    assert shown["parts"]["activations"] - frozen["parts"]["activations"] > least
    assert without["parts"]["activations"] < both["parts"]["activations"] < frozen["parts"]["activations"]
    assert shown["parts"]["optimizer"] > frozen["parts"]["optimizer"]
    again = planned(*images, "--activation-memory", "checkpoint")
    assert again["encoder_levels"] == ["checkpoint"] * 4
    assert again["peak"] < shown["peak"]
    assert main([*command, "--images", "8", "--image-size", "1036x1036"]) == 2
    assert "take 10952 tokens" in capsys.readouterr().err


def test_levels_are_chosen_for_the_encoder_too(config_file):
    model = liger_models.from_config(config_file, device="meta", dtype="bfloat16")
    shown = shown_of_size(model.spec.vision, 4, 1036, 1036)
    memory = StepMemory(model, Step(1, 8192, shown=shown))
    peaks = {level: memory.plan([level] * 8).peak for level in LEVELS}
    assert peaks["all"] > peaks["lean"] > peaks["mlp"] > peaks["checkpoint"]
    chosen = memory.choose_levels((peaks["lean"] + peaks["checkpoint"]) // 2)
    assert chosen.fits
    assert len(chosen.levels) == len(chosen.encoder_levels) == 4
    assert "in the encoder's layers 0 to" in str(chosen)


def test_auto_chooses_at_the_first_images_and_again_for_more():
    model = liger_models.from_config(find_architecture("gemma3").tiny, device="cpu")
    model.set_activation_memory("auto", "2MiB")
    image, size = model.spec.vision.image_id, model.spec.vision.pictures.size
    each = shown_of_size(model.spec.vision, 1, size, size).features
    found = []
    for count in (0, 1, 4, 1):
        ids = torch.tensor([[20, 21, *([image] * each + [22]) * count]])
        call = {}
        if count:
            call["pixel_values"] = torch.randn(count, 3, size, size)
            call["token_type_ids"] = (ids == image).int()
        model(ids, labels=ids.masked_fill(ids == image, -100), **call).loss.backward()
        found.append(model.fit_levels.plan)
    assert [len(plan.encoder_levels) for plan in found] == [0, *[len(model.vision.encoder.layers)] * 3]
    assert found[3] is found[2]
    assert found[2].peak > found[1].peak
    levels = tuple(layer.activation_memory for layer in model.vision.encoder.layers)
    assert levels == found[2].encoder_levels
