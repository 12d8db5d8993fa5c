"""A plan counts the memory kept by an image encoder and its projector."""

from __future__ import annotations

import json

import pytest
import torch
from live_bytes import AsCuDNN, LiveBytes, as_on_a_gpu
from wide import PUBLISHED, _cut_encoders

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cards.published import read_config, with_layers
from liger_models.cli import main
from liger_models.layers.grids import grid_attention
from liger_models.layers.memory import Step, StepMemory, shown_of_size
from liger_models.layers.memory.pictures import shown_by
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.specs import AnyresPictures, SquarePictures, TiledVisionSpec, WindowedPictures
from liger_models.layers.vision.pictures import Pictures, PicturesInWindows, QueriedPictures
from liger_models.layers.vision.tiled_encoder import TiledImages


def wide_model(family):
    """A published model with few layers, on the meta device."""
    path = next(
        path for path in sorted(PUBLISHED.glob("*.json")) if read_config(path)["model_type"] == family
    )
    config = with_layers(read_config(path), 3)
    if "vision_config" in config:
        _cut_encoders(config)
    return liger_models.from_config(config, device="meta", dtype="bfloat16").train()


def pictures_for(spec):
    """Pictures in float32, of different sizes if the family supports that."""
    patches = spec.patches
    if isinstance(spec, TiledVisionSpec):
        with torch.device("meta"):
            pixels = torch.empty(1, 1, spec.tiles, patches.channels, spec.image_size, spec.image_size)
            return TiledImages(pixels, torch.ones(1, 1).long(), torch.ones(1, 1, spec.tiles).bool())
    if isinstance(spec.pictures, WindowedPictures):
        side = spec.pictures.side
        pixels = torch.empty(2 * side**2, patches.width, device="meta")
        windows = torch.arange(side**2 // 4 * 4, device="meta").view(-1, 4)
        return PicturesInWindows(pixels, [(1, side, side)] * 2, windows, [len(windows)])
    grids = [(1, 24, 36), (1, 48, 24)]
    if isinstance(spec.pictures, SquarePictures | AnyresPictures):
        grids = [(1, *[spec.pictures.size // patches.size] * 2)] * 2
    if spec.query_encoder is not None:  # six crops and the whole image
        grids = [*[(1, 48, 48)] * 6, (1, 64, 64)]
        pixels = torch.empty(6 * 48**2 + 64**2, patches.width, device="meta")
        return QueriedPictures(pixels, grids, [6 * 144 + 256 + 1])
    rows = sum(h * w for _, h, w in grids)
    return Pictures(torch.empty(rows, patches.width, device="meta"), grids, 2, extra=int(spec.class_feature))


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


# One for each kind of projector, and encoders with tiles, class tokens, windows and convolutions.
KINDS = [
    *(
        "aya_vision",
        "deepseek_ocr2",
        "gemma3",
        "gemma4",
        "glm4v",
        "got_ocr2",
        "internvl",
        "lfm2_vl",
        "lfm3_vl",
        "llama4",
        "llava",
    ),
    *(
        "granite4_vision",
        "minicpmv4_6",
        "mistral3",
        "mllama",
        "molmo2",
        "ovis2",
        "qwen3_vl",
        "step3p7",
        "video_llama_3",
    ),
]


@pytest.mark.parametrize("family", KINDS)
def test_the_plan_equals_the_bytes_that_a_wide_encoder_keeps(family, monkeypatch):
    """To 0.5%: a plan leaves out vectors of one number per token and the places of patches."""
    monkeypatch.setattr(
        grid_attention, "unmasked_attention", lambda q, k, v, *_, **__: AsCuDNN.apply(q, k, v, None)
    )
    model = wide_model(family)
    pictures = pictures_for(model.spec.vision)
    memory = StepMemory(model, Step(1, 64, shown=shown_by(model.spec.vision, pictures)))
    edges = memory._edges
    planned = sum(costs.kept["lean"] for costs in memory.encoder) + edges.encoder + edges.projector
    rotated = sum(4 * rope.dim for rope in {r for b in model.spec.vision.blocks for r in b.ropes})
    there = [
        *model.parameters(),
        *model.buffers(),
        *(x for x in vars(pictures).values() if torch.is_tensor(x)),
    ]
    with as_on_a_gpu("meta"), LiveBytes(there, "meta") as live:
        features = model.vision(pictures)
    made = sum(x.nbytes for x in features) + memory.step.shown.tokens * rotated
    assert features[0].requires_grad
    assert live.now - made == pytest.approx(planned, rel=5e-3)


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
