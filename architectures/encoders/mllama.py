"""Encoder of Llama 3.2 Vision (arXiv:2407.21783, section 7), for images split into tiles: layers with
LayerNorm and plain MLPs, then layers with gated branches. Outputs of several layers are concatenated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import LINEAR_NAMES, patches, whole_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, LayerNormSpec, TiledVisionSpec

NAMES = (
    ("encoder.patch_embed.", "vision_model.patch_embedding."),
    ("encoder.class_token", "vision_model.class_embedding"),
    ("encoder.before.weight", "vision_model.pre_tile_positional_embedding.embedding.weight"),
    ("encoder.before.", "vision_model.pre_tile_positional_embedding."),
    ("encoder.after.weight", "vision_model.post_tile_positional_embedding.embedding.weight"),
    ("encoder.after.", "vision_model.post_tile_positional_embedding."),
    ("encoder.place.weight", "vision_model.gated_positional_embedding.tile_embedding.weight"),
    ("encoder.place.", "vision_model.gated_positional_embedding."),
    ("encoder.norm_before.", "vision_model.layernorm_pre."),
    ("encoder.norm_after.", "vision_model.layernorm_post."),
    ("encoder.local.", "vision_model.transformer.layers."),
    ("encoder.overall.", "vision_model.global_transformer.layers."),
    *LINEAR_NAMES,
    ("projector.", "multi_modal_projector."),
)
"""Names of the encoder and the projector."""
RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
TINY: dict[str, Any] = {
    "model_type": "mllama_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_global_layers": 1,
    "attention_heads": 2,
    "hidden_act": "quick_gelu",
    "image_size": 14,
    "patch_size": 6,
    "max_num_tiles": 3,
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [1, 3], [3, 1]],
    "intermediate_layers_indices": [2, 0],
    "vision_output_dim": 48,
    "norm_eps": 1e-3,
}


def vision(v: HFConfig, image_id: int) -> TiledVisionSpec:
    """Spec of the encoder, from its config.

    Raises:
        ConfigError: invalid heads, layers or ratios.
    """
    v.fill({"hidden_act": "gelu", "intermediate_size": 5120, "attention_heads": 16})
    width, heads = v.take_count("hidden_size", 1280), v.take_count(("attention_heads", "num_attention_heads"))
    count = v.take_count("num_hidden_layers", 32)
    taken = tuple(v.take_layers("intermediate_layers_indices", [3, 7, 15, 23, 30], among=count))
    ratios = v.take("supported_aspect_ratios", RATIOS)
    if not isinstance(ratios, list):
        raise ConfigError(f"{v.name}: supported_aspect_ratios must be a list of pairs, found {ratios!r}")
    v.take_only(vision_output_dim=width * (1 + len(taken)))
    norm = LayerNormSpec(eps=v.take_number("norm_eps", 1e-5))
    attention = whole_attention(v, width, heads, bias=False)
    block = BlockSpec(attention, mlp(v, bias=True, gated=False), norm)
    return TiledVisionSpec(
        width,
        patches(v, 14, bias=False, frames=1),
        (block,) * count,
        (replace(block, topology="gated_pre_norm"),) * v.take_count("num_global_layers", 8),
        image_size=v.take_count("image_size", 448),
        tiles=v.take_count("max_num_tiles", 4),
        ratios=len(ratios),
        taken=taken,
        norm=LayerNormSpec(eps=1e-5),
        image_id=image_id,
    )
