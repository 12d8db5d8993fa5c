"""Muse Glimmer's encoder, for images and videos of any size: windows of the position table's size in most
layers, and a table with zeros around it.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import FULL, layer_types, mlp
from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_attention, patches
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AdapterSpec,
    BlockSpec,
    FadingTable,
    GridPictures,
    LayerNormSpec,
    NormSpec,
    VisionSpec,
)

WINDOW = "window_attention"
NAMES = (
    ("encoder.patch_embed.", "vision_tower.patch_embedder.patch_embedding."),
    ("encoder.table.", "vision_tower.patch_embedder.position_embedding_table."),
    ("encoder.norm_before.", "vision_tower.ln_pre."),
    ("encoder.norm_after.", "vision_tower.ln_post."),
    ("encoder.layers.", "vision_tower.layers."),
    (".input_layernorm.", ".norm1."),
    (".post_attention_layernorm.", ".norm2."),
    (".self_attn.o_proj.", ".attn.proj."),
    (".self_attn.", ".attn."),
    *LINEAR_NAMES,
    ("projector.linear_1.", "vision_projection."),
    ("projector.", "vision_adapter."),
)
PERMUTED = (("vision.encoder.patch_embed.weight", "d (t c y x) -> d c t y x"),)
TINY: dict[str, Any] = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 3,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_types": [WINDOW, FULL, WINDOW],
    "layer_norm_eps": 2e-3,
}


def vision(c: HFConfig, v: HFConfig, norm: NormSpec) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own; `norm` is applied to its features.

    Raises:
        ConfigError: a position table that is not square, or windows that cut through tokens.
    """
    v.fill({"num_hidden_layers": 50, "intermediate_size": 8960, "hidden_act": "gelu"})
    v.take("max_position_embeddings", None)  # unused by the reference
    v.take_only(merge_size=2, patch_temporal=2)
    width, merge = v.take_count("hidden_size", 1536), 2
    side = v.take_count("pos_emb_height", 32)
    v.take_only(pos_emb_width=side)
    if side % merge:
        raise ConfigError(
            f"{v.name}: pos_emb_height is {side}, the side of windows, too; expected a multiple of {merge}, "
            "of the patches that make a token"
        )
    c.take_only(out_hidden_size=width * merge**2, projector_hidden_act="gelu")
    kinds = layer_types(v, lambda i: _usual(i, v.take_count("num_hidden_layers")), (FULL, WINDOW))
    attention = axial_attention(v, width, v.take_count("num_attention_heads", 16), axes=(1, 0))
    block = BlockSpec(attention, mlp(v, bias=True, gated=False), LayerNormSpec(1e-5))
    outer = LayerNormSpec(v.take_number("layer_norm_eps", 1e-5))
    return VisionSpec(
        width,
        patches(v, 14, bias=False, frames=2),
        (block,) * len(kinds),
        AdapterSpec(merge, c.take_count("projector_hidden_size", 4096), norm, interleaved=True),
        c.take_count("image_token_id", 200092, least=0),
        c.take_count("video_token_id", 200091, least=0),
        windowed=tuple(i for i, kind in enumerate(kinds) if kind == WINDOW),
        window=side // merge,
        position_table=FadingTable(side),
        pictures=GridPictures(raster=True),
        norm_before=outer,
        norm_after=outer,
    )


def _usual(layer: int, layers: int) -> str:
    return FULL if (layer + 1) % 4 == 0 or layer == layers - 1 else WINDOW
