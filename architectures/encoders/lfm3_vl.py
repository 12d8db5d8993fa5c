"""LFM3-VL's encoder for images and videos of any size: gated convolutions over the grid of patches, and
attention in some layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common.grouped_attention import check_groups
from liger_models.architectures.common.liquid import CONV, EXPERTS, PRE_NORM
from liger_models.architectures.common.model import FULL, layer_types
from liger_models.architectures.encoders.parts import axial_attention, patches, projector_activation
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    GridConvSpec,
    LayerNormSpec,
    MLPProjectorSpec,
    MLPSpec,
    NormSpec,
    QKNormSpec,
    VisionSpec,
)

NAMES = (
    *(("encoder.norm_patches.", "vision_tower.embedding_norm."), ("encoder.", "vision_tower.")),
    *((".mlp.", ".feed_forward."), *EXPERTS, *PRE_NORM, (".self_attn.o_proj.", ".self_attn.out_proj.")),
    *(("projector.patch_norm.", "projector.layer_norm."), ("projector.", "multi_modal_projector.")),
)
"""Names of the encoder and the projector in transformers' modules."""
RELEASED = (
    *((".patch_embed.", ".patchifier."), (".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm.")),
    *NAMES,
)
"""The same in released checkpoints."""
PERMUTED = (("vision.encoder.patch_embed.weight", "d (c t h w) -> d c t h w"),)
TINY: dict[str, Any] = {
    "model_type": "lfm3_vl_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": [CONV, FULL, CONV],
    "conv_kernel_size": 5,
    "patch_size": 3,
    "norm_eps": 2e-3,
}


def vision(c: HFConfig, v: HFConfig) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own.

    Raises:
        ConfigError: a convolution of an even width.
    """
    for key in ("vision_start_token_id", "vision_end_token_id"):
        c.take(key, None)  # placed by the processor
    width, norm = v.take_count("hidden_size", 1024), NormSpec(eps=v.take_number("norm_eps", 1e-5))
    heads, kv_heads = v.take_count("num_attention_heads", 16), v.take_count("num_key_value_heads", 8)
    check_groups(v, heads, kv_heads)
    attention = axial_attention(v, width, heads, bias=False, theta=1e6)
    attention = replace(attention, num_key_value_heads=kv_heads, qk_norm=QKNormSpec(norm))
    kernel = v.take_count("conv_kernel_size", 3)
    if kernel % 2 == 0:
        raise ConfigError(f"{v.name}: conv_kernel_size must be odd, or grids would change their size")
    of_kind: dict[str, AttentionSpec | GridConvSpec] = {CONV: GridConvSpec(kernel), FULL: attention}
    v.fill({"num_hidden_layers": 14})
    types = layer_types(v, lambda i: CONV if i < 2 or i % 2 else FULL, (CONV, FULL))
    mlp = MLPSpec(v.take_count("intermediate_size", 2560))
    projector = MLPProjectorSpec(
        projector_activation(c),
        c.take_flag("projector_bias", True),
        v.take_count("spatial_merge_size", 2),
        size=c.take_count("projector_hidden_size", 4096),
        patch_norm=LayerNormSpec(1e-6),
    )
    return VisionSpec(
        width,
        patches(v, 16, bias=False),
        tuple(BlockSpec(of_kind[kind], mlp, norm) for kind in types),
        projector,
        c.take_count("image_token_id", 125030, least=0),
        c.take_count("video_token_id", 125029, least=0),
        norm_patches=norm,
    )
