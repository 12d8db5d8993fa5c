"""Llama 4's encoder, for square tiles: LayerNorm, plain MLPs, a position table and rotary embeddings by
column and row, and a class token at the end. The adapter merges patches (pixel shuffle).
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AdapterSpec,
    BlockSpec,
    FixedTable,
    LayerNormSpec,
    MLPSpec,
    PatchSpec,
    SquarePictures,
    VisionSpec,
)

NAMES = (
    ("encoder.patch_embed.", "vision_model.patch_embedding.linear."),
    ("encoder.class_token.weight", "vision_model.class_embedding"),
    ("encoder.table.weight", "vision_model.positional_embedding_vlm"),
    ("encoder.norm_before.", "vision_model.layernorm_pre."),
    ("encoder.norm_after.", "vision_model.layernorm_post."),
    ("encoder.layers.", "vision_model.model.layers."),
    *LINEAR_NAMES,
    ("projector.fc", "vision_model.vision_adapter.mlp.fc"),
    ("projector.", "multi_modal_projector."),
)
"""Names of the encoder and the projector."""
TINY: dict[str, Any] = {
    "model_type": "llama4_vision_model",
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 3,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


def vision(v: HFConfig, image_id: int) -> VisionSpec:
    """Spec of the encoder, from its config.

    Raises:
        ConfigError: incompatible widths.
    """
    for key in (
        *("hidden_act", "norm_eps", "multi_modal_projector_bias"),
        *("vision_feature_layer", "vision_feature_select_strategy"),
    ):
        v.take(key, None)  # unused by the reference
    width, heads = v.take_count("hidden_size", 768), v.take_count("num_attention_heads", 16)
    ratio, size = v.take_number("pixel_shuffle_ratio", 0.5), v.take_count("projector_output_dim", 4096)
    merge = round(1 / ratio) if ratio else 0
    if not merge or abs(merge * ratio - 1) > 1e-6:
        raise ConfigError(f"{v.name}: pixel_shuffle_ratio must be one over a whole number, found {ratio}")
    inner = v.take_count("intermediate_size", 5632)
    if inner != width * merge**2:
        raise ConfigError(
            f"{v.name}: intermediate_size is {inner}, and {merge} times {merge} patches of {width} are "
            f"{width * merge**2}; expected as many, which enter the adapter"
        )
    v.take_only(projector_input_dim=size, projector_dropout=0.0, num_channels=3)
    v.take_only(vision_output_dim=size)
    attention, norm = axial_attention(v, width, heads, axes=(1, 0), interleaved=True), LayerNormSpec(eps=1e-5)
    block = BlockSpec(attention, MLPSpec(inner, "gelu", bias=True, gated=False), norm)
    image, patch = v.take_count("image_size", 448), v.take_count("patch_size", 14)
    return VisionSpec(
        width,
        PatchSpec(patch),
        (block,) * v.take_count("num_hidden_layers", 34),
        AdapterSpec(merge, size),
        image_id,
        position_table=FixedTable(image // patch),
        pictures=SquarePictures(image),
        norm_before=norm,
        norm_after=norm,
        class_token="last",
    )
