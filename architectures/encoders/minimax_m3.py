"""MiniMax-M3's encoder: CLIP's blocks for images and videos of any size, whose time steps attend to one
another; time step, row and column rotate a part of each head.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_theta, patches, whole_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    LayerNormSpec,
    RopeSpec,
    TwiceProjectedSpec,
    VisionSpec,
)

NAMES = (
    ("encoder.norm_before.", "vision_tower.pre_layrnorm."),
    ("encoder.patch_embed.", "vision_tower.embeddings.proj."),
    ("encoder.layers.", "vision_tower.layers."),
    (".input_layernorm.", ".layer_norm1."),
    (".post_attention_layernorm.", ".layer_norm2."),
    (".o_proj.", ".out_proj."),
    *LINEAR_NAMES,
    ("projector.", "multi_modal_projector."),
)
"""Names of the encoder and the projector in transformers' modules."""
RELEASED = (
    *NAMES,
    ("vision_tower.layers.", "vision_tower.vision_model.encoder.layers."),
    ("vision_tower.pre_layrnorm.", "vision_tower.vision_model.pre_layrnorm."),
    ("vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
    ("multi_modal_projector.merge_", "patch_merge_mlp."),
)
"""The same in released checkpoints."""
TINY: dict[str, Any] = {
    "model_type": "minimax_m3_vl_vision",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "layer_norm_eps": 2e-5,
}


def vision(c: HFConfig, v: HFConfig) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own.

    Raises:
        ConfigError: heads too narrow for three axes.
    """
    v.fill({"intermediate_size": 5120, "hidden_act": "gelu"})
    v.take("image_size", None)  # of the processor
    width, heads = v.take_count("hidden_size", 1280), v.take_count("num_attention_heads", 16)
    pairs = width // heads // 3 // 2  # of each axis
    if not pairs:
        raise ConfigError(f"{v.name}: heads of {width // heads} dimensions; three axes need at least 6")
    # Of a rotation of 6 n dimensions every third frequency is one of 2 n.
    rope = RopeSpec(
        6 * pairs,
        axial_theta(v, 10000.0),
        axes=(2,) * pairs + (0,) * pairs + (1,) * pairs,
        frequencies=tuple(range(0, 3 * pairs, 3)) * 3,
    )
    norm = LayerNormSpec(v.take_number("layer_norm_eps", 1e-5))
    block = BlockSpec(whole_attention(v, width, heads, rope=rope), mlp(v, bias=True, gated=False), norm)
    merge = v.take_count("spatial_merge_size", 2)
    return VisionSpec(
        width,
        patches(v, 14, bias=False),
        (block,) * v.take_count("num_hidden_layers", 32),
        TwiceProjectedSpec(merge, c.take_count("projector_hidden_size", 6144)),
        c.take_count(("image_token_index", "image_token_id"), 200025, least=0),
        c.take_count(("video_token_index", "video_token_id"), 200026, least=0),
        norm_before=norm,
        joined_steps=True,
    )
