"""GLM-4.1V's encoder (arXiv:2507.01006), for images of any size: gated MLPs, norms without biases, a position
table resized to each image, and a convolution that merges patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from liger_models.architectures.common import activation
from liger_models.architectures.common.mlps import clamped_activation
from liger_models.architectures.encoders.parts import axial_attention, patches
from liger_models.architectures.encoders.qwen import NAMES as QWEN
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BicubicTable,
    BlockSpec,
    DownsamplingProjectorSpec,
    MLPSpec,
    NormSpec,
    QKNormSpec,
    TimeSpec,
    VisionSpec,
)

NAMES = (
    *(name for name in QWEN if not name[0].startswith("projector.")),
    ("encoder.norm_patches.", "post_conv_layernorm."),
    ("encoder.norm_after.", "post_layernorm."),
    ("encoder.table.", "embeddings.position_embedding."),
    ("projector.downsample.", "downsample."),
    ("projector.linear.", "merger.proj."),
    ("projector.norm.", "merger.post_projection_norm."),
    ("projector.", "merger."),
    (".self_attn.", ".attn."),
)
SKIP_VIDEOS = {
    f"field:TimeSpec.{field}": "the frames of videos are images to the model"
    for field in ("tokens_per_second", "steps_apart")
}
TINY_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 2, 1],
}
TINY: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 15,
    "patch_size": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "intermediate_size": 40,
    "attention_bias": True,
    "rms_norm_eps": 2e-3,
}


def layout(text: Layout) -> Layout:
    """Layout of a family whose language model has this layout of its own."""
    whole = (*(f"layers.{pattern}" for pattern in text.whole), "vision.encoder.layers.*.qkv_proj.*")
    vision = Layout(NAMES, root="model.visual.")
    return replace(text, whole=whole, root="model.language_model.", parts=(("vision.", vision),))


def further_layers(c: HFConfig, default: int) -> tuple[str, ...]:
    """Pattern of the layer for multi-token prediction, which follows the language model's own and does not
    run. `default` is the number of these.
    """
    text = c.raw.get("text_config")
    depth = text.get("num_hidden_layers", default) if isinstance(text, Mapping) else default
    return (f"model.language_model.layers.{depth}.*",)


def vision(c: HFConfig, v: HFConfig, text_size: int) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own; `text_size` is the language model's width.

    Raises:
        ConfigError: images smaller than a patch.
    """
    for key in ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"):
        c.take(key, None)  # inserted by the processor
    c.take("video_token_id", None)  # frames of videos are images to the model, with the images' token
    width, norm = v.take_count("hidden_size", 1536), NormSpec(eps=v.take_number("rms_norm_eps", 1e-5))
    v.take_only(out_hidden_size=text_size)
    v.fill({"hidden_act": "silu"})
    act, bias = activation(v), v.take_flag("attention_bias", False)
    attention = axial_attention(v, width, v.take_count("num_heads", 12), bias=bias)
    attention = replace(attention, o_bias=False)
    spec, merge = patches(v, 14, bias=True), v.take_count("spatial_merge_size", 2)
    side = v.take_count("image_size", 336)
    if side < spec.size:
        raise ConfigError(f"{v.name}: image_size is {side}, less than one patch of {spec.size} pixels")
    return VisionSpec(
        width,
        spec,
        (BlockSpec(attention, MLPSpec(text_size, act), norm),) * v.take_count("depth", 24),
        DownsamplingProjectorSpec(merge, v.take_count("intermediate_size", 13696), act),
        c.take_count("image_token_id", 151343, least=0),
        positions=TimeSpec(),
        position_table=BicubicTable(side // spec.size),
        norm_patches=norm,
        norm_after=norm,
        kinds="mm_token_type_ids",
    )


def ocr_vision(c: HFConfig, v: HFConfig, text_size: int) -> VisionSpec:
    """The encoder of GLM-OCR: the same with norms of queries and keys, with biases, and without the position
    table.
    """
    v.fill({"hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "attention_bias": True})
    spec, bias = vision(c, v, text_size), v.take_flag("attention_bias", True)
    block = spec.blocks[0]
    assert isinstance(block.mixer, AttentionSpec)
    assert isinstance(block.norm, NormSpec)
    block = replace(
        block,
        mixer=replace(block.mixer, o_bias=bias, qk_norm=QKNormSpec(block.norm)),
        mlp=MLPSpec(v.take_count("intermediate_size"), activation(v), bias=bias),
    )
    return replace(
        spec,
        blocks=(block,) * len(spec.blocks),
        projector=DownsamplingProjectorSpec(spec.projector.merge, 3 * text_size, activation(v)),
        position_table=None,
        norm_patches=None,
    )


def clamped_vision(c: HFConfig, v: HFConfig, text_size: int) -> VisionSpec:
    """The encoder of GLM-5.3-Flash: GLM-OCR's with clamped activations, for a language model without
    positions.
    """
    v.take_only(hidden_act="silu")
    spec = ocr_vision(c, v, text_size)
    clamped = clamped_activation(v)
    block, inner = spec.blocks[0], v.take_count("projection_intermediate_size", 10240)
    assert isinstance(block.mlp, MLPSpec)
    return replace(
        spec,
        blocks=(replace(block, mlp=replace(block.mlp, activation=clamped)),) * len(spec.blocks),
        projector=DownsamplingProjectorSpec(spec.projector.merge, inner, limit=clamped.limit),
        positions=None,
        kinds=None,
    )
