"""C-RADIO, an encoder for images of any size (NVIDIA, 2024, arXiv:2312.06709): learned tokens before the
patches, and positions cropped from a square.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from liger_models.architectures.common import activation
from liger_models.architectures.encoders.parts import LINEAR_NAMES, patches, whole_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    CroppedTable,
    FlatGrids,
    LayerNormSpec,
    MLPProjectorSpec,
    MLPSpec,
    ModelSpec,
    ProjectorSpec,
    VisionSpec,
)

SCALE = ".layer_scale1.lambda1"
_OF_LAYERS = (
    (".input_layernorm.", ".norm1."),
    (".post_attention_layernorm.", ".norm2."),
    (".attention_scale.weight", SCALE),
    (".mlp_scale.weight", ".layer_scale2.lambda1"),
)
NAMES = (
    ("patch_embed.", "radio_model.model.patch_generator.embedder."),
    ("table.weight", "radio_model.model.patch_generator.pos_embed"),
    ("prefix.weight", "radio_model.model.patch_generator.cls_token.token"),
    ("layers.", "radio_model.model.blocks."),
    ("video_embed.", "radio_model.model.patch_generator.video_embedder."),
    ("summary_idxs", "radio_model.summary_idxs"),
    *_OF_LAYERS,
    (".self_attn.qkv_proj.", ".attn.qkv."),
    (".self_attn.o_proj.", ".attn.proj."),
    *LINEAR_NAMES,
)
"""Names of the encoder in checkpoints, after `vision_model.`; `JOINED` tensors are stored as one."""
JOINED = ("vision.encoder.*.qkv_proj.*",)
NAMES_IN_MODULES = (
    ("patch_embed.", "embeddings.patch_projection."),
    ("table.weight", "embeddings.position_embedding"),
    ("prefix.weight", "embeddings.cls_register_token"),
    ("layers.", "encoder.layer."),
    ("video_embed.", "embeddings.video_patch_projection."),
    *_OF_LAYERS,
    (".self_attn.", ".attention."),
    *LINEAR_NAMES,
)
"""The same in transformers' modules."""
PERMUTED = (
    ("vision.encoder.patch_embed.weight", "d (c h w) -> d c h w"),
    ("vision.encoder.table.weight", "1 n d -> (1 n) d"),
)
UNREAD = (
    *("vision_model.*summary_idxs", "vision_model.*input_conditioner.*"),
    *("vision_model.*.video_embedder.*", "vision_model.*.video_patch_projection.*"),
)
"""Patterns of the encoder's unused tensors: of its summaries, the normalisation of pixels, which processors
do, and videos.
"""
_OF_PROCESSOR_AND_SUMMARIES = """
    adaptor_configs adaptor_names args auto_map image_size max_num_patches max_resolution min_num_patches
    norm_mean norm_std patch_dim preferred_resolution separate_video_embedder summary_idxs version
    video_patch_dim video_temporal_patch_size
"""
ASIDE = """
    force_image_size img_context_token img_context_token_id img_end_token img_start_token llm_config
    max_sequence_length norm_mean norm_std patch_size ps_version sound_context_token template use_thumbnail
    video_context_token video_context_token_id video_pruning_rate video_temporal_patch_size video_token_id
    vit_hidden_size
"""
"""Keys next to the encoder's config, of processors, of videos, or another name of a key."""
TINY: dict[str, Any] = {
    "model_type": "radio",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mlp_ratio": 1.25,
    "patch_size": 3,
    "max_img_size": 16,
    "num_cls_tokens": 2,
    "num_registers": 1,
    "layer_norm_eps": 2e-3,
    "qkv_bias": True,
    "layerscale_value": 1.0,
    "video_temporal_patch_size": 2,
}


def vision(v: HFConfig, projector: ProjectorSpec, image_id: int) -> VisionSpec:
    """The encoder, from its config.

    Raises:
        ConfigError: windows, normalised features, gated MLPs, or dropped branches.
    """
    for key in _OF_PROCESSOR_AND_SUMMARIES.split():
        v.take(key, None)
    for key in ("feature_normalizer_config", "inter_feature_normalizer_config", "vitdet_window_size"):
        v.take_only(**{key: None})
    v.take_only(drop_path_rate=0.0, use_swiglu_ffn=False)
    v.fill({"hidden_act": "gelu"})
    width, norm = v.take_count("hidden_size", 1280), LayerNormSpec(v.take_number("layer_norm_eps", 1e-6))
    patch, side = patches(v, 16, bias=False, frames=1), v.take_count("max_img_size", 2048)
    if side < patch.size:
        raise ConfigError(f"{v.name}: max_img_size is {side}, less than one patch of {patch.size} pixels")
    attention = whole_attention(
        v, width, v.take_count("num_attention_heads", 16), qkv_bias=v.take_flag("qkv_bias", True)
    )
    size = int(width * v.take_number("mlp_ratio", 4.0))
    block = BlockSpec(
        *(attention, MLPSpec(size, activation(v, gated=False), bias=True, gated=False), norm, "layer_scale"),
        initial_scale=v.take_number("layerscale_value", 1.0),
    )
    return VisionSpec(
        width,
        patch,
        (block,) * v.take_count("num_hidden_layers", 32),
        projector,
        image_id,
        position_table=CroppedTable(side // patch.size),
        pictures=FlatGrids(),
        prefix_tokens=v.take_count("num_cls_tokens", 3) + v.take_count("num_registers", 7, least=0),
    )


def as_stored(spec: ModelSpec, names: Collection[str] | None, final_norm: str) -> ModelSpec:
    """The spec of a checkpoint with tensors of these `names`, or without one. Released checkpoints leave out
    the scales of the encoder's branches, which are one, and the weight and bias of a `final_norm`, one and
    zero.
    """
    if names is None:
        return spec
    vision = spec.vision
    assert isinstance(vision, VisionSpec)
    projector = vision.projector
    assert isinstance(projector, MLPProjectorSpec)
    if not any(name.endswith(SCALE) for name in names):
        blocks = tuple(replace(block, topology="pre_norm") for block in vision.blocks)
        vision = replace(vision, blocks=blocks)
    if isinstance(projector.patch_norm, LayerNormSpec) and not any(
        name.endswith(f"{final_norm}.weight") for name in names
    ):
        plain = replace(projector.patch_norm, weighted=False, bias=False)
        vision = replace(vision, projector=replace(projector, patch_norm=plain))
    return replace(spec, vision=vision)
