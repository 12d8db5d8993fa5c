"""Molmo 2's encoder for images of one size. The projector reads outputs of several layers, concatenated, and
pools patches by attention; the processor says which patches make a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import activation, check_groups, mlp
from liger_models.architectures.encoders.parts import whole_attention
from liger_models.architectures.encoders.siglip2 import CHANNELS_LAST
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    BlockSpec,
    FixedTable,
    LayerNormSpec,
    PatchSpec,
    PoolingAttentionSpec,
    VisionSpec,
    WindowedPictures,
)

PERMUTED = CHANNELS_LAST
_PROJECTOR = "multi_modal_projector."
NAMES = (
    ("encoder.patch_embed.", "vision_tower.patch_embedding."),
    ("encoder.table.weight", "vision_tower.positional_embedding"),
    ("encoder.layers.", "vision_tower.layers."),
    (".input_layernorm.", ".layer_norm1."),
    (".post_attention_layernorm.", ".layer_norm2."),
    (".mlp.up_proj.", ".mlp.fc1."),
    (".mlp.down_proj.", ".mlp.fc2."),
    *((f"projector.{name}_proj.", f"{_PROJECTOR}image_pooling_2d.{name}_proj.") for name in "qkvo"),
    *(
        (f"projector.{name}_proj.", f"{_PROJECTOR}image_projector.{name}_proj.")
        for name in ("gate", "up", "down")
    ),
)
"""Names of the encoder and the projector in transformers' modules."""
RELEASED = (
    *NAMES,
    ("vision_tower.layers.", "vision_backbone.image_vit.transformer.resblocks."),
    ("vision_tower.", "vision_backbone.image_vit."),
    (_PROJECTOR, "vision_backbone."),
    *((f".{name}_proj.", f".w{name}.") for name in "qkvo"),
    (".self_attn.", ".attention."),
    *((".layer_norm1.", ".attention_norm."), (".layer_norm2.", ".ffn_norm.")),
    *((".mlp.fc1.", ".feed_forward.w1."), (".mlp.fc2.", ".feed_forward.w2.")),
    *((f".{name}_proj.", f".w{number}.") for name, number in (("gate", 1), ("down", 2), ("up", 3))),
)
"""The same in checkpoints."""
READ_BY_PROCESSORS = (
    *("image_start_token_id", "image_end_token_id", "low_res_image_start_token_id", "image_col_id"),
    *("frame_start_token_id", "frame_end_token_id", "image_low_res_id", "image_high_res_id"),
    "use_frame_special_tokens",
)
TINY: dict[str, Any] = {
    "model_type": "molmo2_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "image_size": [15, 15],
    "patch_size": 3,
    "layer_norm_eps": 2e-3,
}
TINY_ADAPTER: dict[str, Any] = {
    "model_type": "molmo2_adapter",
    "vision_feature_layer": [1, -3],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 28,
    "text_hidden_size": 48,
}


def parts(c: HFConfig) -> tuple[HFConfig, HFConfig]:
    """The configs of the encoder, which released checkpoints name `vit_config`, and of the adapter."""
    named = "vision_config" if c.raw.get("vision_config") is not None else "vit_config"
    c.take("vit_config", None)
    return c.part(named), c.part("adapter_config")


def layers_read(v: HFConfig, adapter: HFConfig) -> tuple[int, ...]:
    """The layers whose outputs the projector reads, counted from 1.

    Raises:
        ConfigError: there is no such layer.
    """
    depth = v.take_count("num_hidden_layers", 25)
    named = adapter.take_one_of("vision_feature_layer", "vit_layers", default=[24, 18])
    good = isinstance(named, list) and named and all(type(i) is int and -depth <= i < depth for i in named)
    if not good:
        raise ConfigError(
            f"{adapter.name}: vision_feature_layer must be a list of the encoder's {depth} layers, from "
            f"{-depth} to {depth - 1}, found {abbreviate(named)}"
        )
    return tuple(i % depth + 1 for i in named)


def unread_layers(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the encoder's layers after the last that is read."""
    v, adapter = parts(c)
    last, depth = max(layers_read(v, adapter)), v.take_count("num_hidden_layers", 25)
    names = ("*vision_tower.layers.", "*image_vit.transformer.resblocks.")
    return tuple(f"{name}{i}.*" for name in names for i in range(last, depth))


def vision(c: HFConfig, hidden_size: int, unsaid: int) -> VisionSpec:
    """Spec of the encoder and the projector.

    Args:
        c: the model's config.
        hidden_size: of the language model.
        unsaid: the first id that the language model cannot predict.

    Raises:
        ConfigError: images that are not squares, or another number of positions than they have patches.
    """
    v, adapter = parts(c)
    v.fill({"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304})
    v.take("float32_attention", None)  # rounding of the original code; unread by the reference
    width, states = v.take_count("hidden_size", 1152), layers_read(v, adapter)
    attention = _attention(v)
    block = BlockSpec(
        replace(
            whole_attention(
                v, attention.head_dim * attention.num_attention_heads, attention.num_attention_heads
            ),
            num_key_value_heads=attention.num_key_value_heads,
            qkv_bias=attention.bias,
            o_bias=attention.bias,
        ),
        mlp(v, bias=True, gated=False),
        LayerNormSpec(v.take_number("layer_norm_eps", 1e-6)),
    )
    size = v.take_one_of("image_size", "image_default_input_size", default=[378, 378])
    patch = v.take_count(("patch_size", "image_patch_size"), 14)
    if not isinstance(size, list) or len(size) != 2 or type(size[0]) is not int or size[0] < patch:
        raise ConfigError(
            f"{v.name}: image_size must be a height and a width of at least a patch, {patch} pixels, found "
            f"{abbreviate(size)}"
        )
    side = size[0] // patch
    positions = v.take_count(("num_position_embeddings", "image_num_pos"), side**2)
    if size[0] != size[1] or positions != side**2:
        raise ConfigError(
            f"{v.name}: image_size is {size} and num_position_embeddings {positions}; expected squares, of "
            "as many patches"
        )
    adapter.take("float32_attention", None)
    adapter.take_only(
        hidden_size=width, text_hidden_size=hidden_size, pooling_attention_mask=True, image_feature_dropout=0
    )
    pooling = replace(
        _attention(adapter),
        size=width,
        intermediate_size=adapter.take_count("intermediate_size", 18944),
        activation=activation(adapter, gated=False),
        mlp_bias=adapter.take_flag("mlp_bias", False),
    )
    return VisionSpec(
        width,
        PatchSpec(patch, channels=v.take_count("num_channels", 3), bias=True),
        (block,) * max(states),
        pooling,
        c.take_count(("image_patch_id", "image_token_id", "video_token_id"), 151938, least=0),
        position_table=FixedTable(side),
        pictures=WindowedPictures(side),
        taken=states,
        kinds="mm_token_type_ids",
        spans="marked",
        added=True,
        unsaid=unsaid,
    )


def _attention(c: HFConfig) -> PoolingAttentionSpec:
    """The sizes of an attention, without those of the MLP after it."""
    heads, kv_heads = c.take_count("num_attention_heads", 16), c.take_count("num_key_value_heads", 16)
    check_groups(c, heads, kv_heads)
    bias = c.take_flag("attention_bias", True)
    return PoolingAttentionSpec(heads, kv_heads, c.take_count("head_dim", 72), 0, 0, bias=bias)
