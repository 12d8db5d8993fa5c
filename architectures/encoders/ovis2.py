"""Ovis2's encoder: AIMv2 (arXiv:2411.14402) for square images, and a projector of visual words."""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import patches, whole_attention
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    FixedTable,
    NormSpec,
    SquarePictures,
    VisionSpec,
    VisualWordsSpec,
)

NAMES = (
    ("patch_embed.", "embeddings.patch_embedding."),
    ("table.", "embeddings.position_embedding."),
    ("norm_patches.", "embeddings.rms_norm."),
    ("norm_after.", "rms_norm."),
    ("layers.", "encoder.layers."),
    (".input_layernorm.", ".rms_norm1."),
    (".post_attention_layernorm.", ".rms_norm2."),
    (".self_attn.", ".attention."),
    (".o_proj.", ".out_proj."),
    (".mlp.", ".ffn."),
)
"""Names of the encoder."""
TABLE = (("weight", "visual_embeddings_table.weight"),)
MARKERS = [151666, 151667, 151668, 151669, 151670]
TINY: dict[str, Any] = {
    "model_type": "ovis2_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "vocab_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 3,
    "image_size": 13,
    "rms_norm_eps": 2e-3,
    "hidden_stride": 2,
    "num_visual_indicator_tokens": 3,
    "tokenize_function": "softmax",
}


def vision(c: HFConfig, v: HFConfig) -> VisionSpec:
    """Spec of the encoder, from the model's config and its own.

    Raises:
        ConfigError: incompatible numbers.
    """
    v.fill({"intermediate_size": 2816})
    v.take_only(tokenize_function="softmax")  # not the argmax, nor a random one
    width, norm = v.take_count("hidden_size", 1024), NormSpec(eps=v.take_number("rms_norm_eps", 1e-5))
    spec, bias = patches(v, 14, bias=True, frames=1), v.take_flag("qkv_bias", False)
    attention = whole_attention(v, width, v.take_count("num_attention_heads", 8), bias=bias)
    size, merge, markers = v.take_count("image_size", 224), v.take_count("hidden_stride", 1), marker_ids(c)
    side, words = size // spec.size, v.take_count("vocab_size", 16384) - len(markers)
    v.take_only(num_visual_indicator_tokens=len(markers))
    if side % merge or words < 1:
        raise ConfigError(
            f"{v.name}: an image has {side} times {side} patches and hidden_stride is {merge}, vocab_size "
            f"leaves {words} words besides {len(markers)} indicators; expected a divisor, and at least a word"
        )
    return VisionSpec(
        width,
        spec,
        (BlockSpec(attention, mlp(v, bias=v.take_flag("mlp_bias", False)), norm),)
        * v.take_count("num_hidden_layers", 24),
        VisualWordsSpec(merge, words, len(markers)),
        c.take_count("image_token_id", 151665, least=0),
        position_table=FixedTable(side),
        pictures=SquarePictures(size),
        norm_patches=norm,
        norm_after=norm,
        marker_ids=markers,
    )


def marker_ids(c: HFConfig) -> tuple[int, ...]:
    """Tokens that frame images in the text.

    Raises:
        ConfigError: not a list of ids.
    """
    found = c.take("visual_indicator_token_ids", MARKERS)
    if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
        raise ConfigError(f"{c.name}: visual_indicator_token_ids must be a list of ids, found {found!r}")
    return tuple(found)
