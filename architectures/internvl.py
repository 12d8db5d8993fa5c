"""InternVL 3 (Zhu et al., 2025, arXiv:2504.10479): a language model that sees tiles of one size, by an
encoder with scaled branches, of whose patches four make a token.
"""

from dataclasses import replace

from liger_models.architectures.common import activation, take_only
from liger_models.architectures.common.images import language_model
from liger_models.architectures.common.towers import states_read, tower_layouts
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import (
    AttentionSpec,
    BlockSpec,
    FixedTable,
    LayerNormSpec,
    MLPProjectorSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    PatchSpec,
    QKNormSpec,
    SquarePictures,
    VisionSpec,
)

NAMES = (
    ("patch_embed.", "embeddings.patch_embeddings.projection."),
    ("table.weight", "embeddings.position_embeddings"),
    ("class_token.weight", "embeddings.cls_token"),
    ("norm_behind.", "layernorm."),
    ("layers.", "encoder.layer."),
    (".input_layernorm.", ".layernorm_before."),
    (".post_attention_layernorm.", ".layernorm_after."),
    (".self_attn.", ".attention."),
    (".o_proj.", ".projection_layer."),
    (".up_proj.", ".fc1."),
    (".down_proj.", ".fc2."),
    (".attention_scale.weight", ".lambda_1"),
    (".mlp_scale.weight", ".lambda_2"),
)


def unread(c: HFConfig) -> tuple[str, ...]:
    """Layers behind the one that is read, what is normalised and not read, and a token of pretraining."""
    v = c.part("vision_config")
    depth, (read,) = v.take_count("num_hidden_layers", 24), states_read(c, v, -1)
    layers = tuple(f"*vision_tower.encoder.layer.{i}.*" for i in range(read, depth))
    return (
        *layers,
        *(("*vision_tower.layernorm.*",) if layers else ()),
        "*vision_tower.embeddings.mask_token",
    )


@register(
    "internvl",
    reference="InternVLForConditionalGeneration",
    tiny={
        "text_config": {"model_type": "qwen2", "head_dim": ..., "hidden_size": 64},
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "image_size": [13, 13],
            "patch_size": [3, 3],
            "layer_norm_eps": 2e-3,
            "use_mean_pooling": False,
        },
        "image_token_id": 3,
    },
    layouts=tower_layouts(
        (("norm.", "layer_norm."),),
        permuted=(
            ("vision.encoder.table.weight", "1 p d -> (1 p) d"),
            ("vision.encoder.class_token.weight", "1 01 d -> (1 01 d)"),
        ),
        encoder=NAMES,
        models=("",),
    ),
    carried=unread,
    variants={
        "lower_layer": {
            "text_config": {"model_type": "qwen3", "head_dim": 16},
            "vision_config": {
                "norm_type": "rms_norm",
                "use_qk_norm": False,
                "attention_bias": False,
                "use_mean_pooling": True,
                "use_mask_token": True,
                "use_absolute_position_embeddings": False,
            },
            "vision_feature_layer": -2,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
        }
    },
)
def internvl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    take_only(c, vision_feature_select_strategy="default")  # the class token goes
    for key in ("image_seq_length", "ignore_index"):
        c.take(key, None)  # of the processor, and of the loss, where it is as everywhere
    c.fill({"projector_hidden_act": "gelu"})
    return replace(text, vision=_encoder(c, v))


def _encoder(c: HFConfig, v: HFConfig) -> VisionSpec:
    width, heads = v.take_count("hidden_size", 1024), v.take_count("num_attention_heads", 16)
    depth, states = v.take_count("num_hidden_layers", 24), states_read(c, v, -1)
    size, patch = _side(v, "image_size", 448), _side(v, "patch_size", 14)
    ratio = c.take_number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio else 0
    if len(states) != 1 or width % heads or not merge or 1 / merge != ratio or size // patch % merge:
        raise ConfigError(
            f"{c.name}: an encoder of width {width} with {heads} heads, of which the states {states} are "
            f"read, and {size // patch} times {size // patch} patches, at a downsample_ratio of {ratio}; "
            "expected a width that heads share out, one state, and one over a divisor of the patches as ratio"
        )
    for key in ("use_mask_token", "layer_scale_init_value", "initializer_factor"):
        v.take(key, None)  # of pretraining, and of fresh weights
    norm_type, eps = v.take("norm_type", "layer_norm"), v.take_number("layer_norm_eps", 1e-6)
    if norm_type not in ("layer_norm", "rms_norm"):
        raise ConfigError(f"{v.name}: norm_type must be layer_norm or rms_norm, found {norm_type!r}")
    norm: NormSpec | LayerNormSpec = LayerNormSpec(eps) if norm_type == "layer_norm" else NormSpec(eps)
    v.fill({"hidden_act": "gelu"})
    attention = AttentionSpec(
        heads,
        heads,
        width // heads,
        (width // heads) ** -0.5,
        qkv_bias=v.take_flag("attention_bias", False),
        o_bias=True,
        qk_norm=QKNormSpec(NormSpec(1e-6), "all_heads") if v.take_flag("use_qk_norm", False) else None,
        causal=False,
    )
    mlp = MLPSpec(v.take_count("intermediate_size", 4096), activation(v, gated=False), bias=True, gated=False)
    final = not v.take_flag("use_mean_pooling", True) and states == (depth,)
    return VisionSpec(
        width,
        PatchSpec(patch, channels=v.take_count("num_channels", 3), bias=True),
        (BlockSpec(attention, mlp, norm, "layer_scale"),) * states[0],
        MLPProjectorSpec(
            activation(c, "projector_hidden_act", gated=False), merge=merge, norm=LayerNormSpec(1e-5)
        ),
        c.take_count("image_token_id", 151667, least=0),
        position_table=FixedTable(size // patch)
        if v.take_flag("use_absolute_position_embeddings", True)
        else None,
        pictures=SquarePictures(size),
        norm_behind=LayerNormSpec(eps) if final else None,
        class_token="first",
    )


def _side(v: HFConfig, key: str, default: int) -> int:
    """Of a square, which a config says by one number or by two."""
    found = v.take(key, default)
    sides = found if isinstance(found, list) else [found]
    if not sides or any(type(side) is not int or side < 1 or side != sides[0] for side in sides):
        raise ConfigError(f"{v.name}: {key} must be the side of a square, found {found!r}")
    return sides[0]
