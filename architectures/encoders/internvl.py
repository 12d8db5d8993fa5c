"""InternVL's encoder (arXiv:2312.14238), for square images, with a class token and scaled branches."""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common import mlp
from liger_models.architectures.encoders.parts import (
    LINEAR_NAMES,
    projector_activation,
    states_read,
    whole_attention,
)
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    CubicTable,
    LayerNormSpec,
    MLPProjectorSpec,
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
    ("norm_after.", "layernorm."),
    ("layers.", "encoder.layer."),
    (".input_layernorm.", ".layernorm_before."),
    (".post_attention_layernorm.", ".layernorm_after."),
    (".self_attn.", ".attention."),
    (".o_proj.", ".projection_layer."),
    *LINEAR_NAMES,
    (".attention_scale.weight", ".lambda_1"),
    (".mlp_scale.weight", ".lambda_2"),
)
"""Names of the encoder, after `vision_tower.`."""
RELEASED = (
    ("patch_embed.", "embeddings.patch_embedding."),
    ("table.weight", "embeddings.position_embedding"),
    ("class_token.weight", "embeddings.class_embedding"),
    ("norm_after.", "layernorm."),
    ("layers.", "encoder.layers."),
    *((".input_layernorm.", ".norm1."), (".post_attention_layernorm.", ".norm2.")),
    *((".self_attn.qkv_proj.", ".attn.qkv."), (".self_attn.o_proj.", ".attn.proj.")),
    (".self_attn.", ".attention."),
    *LINEAR_NAMES,
    *((".attention_scale.weight", ".ls1"), (".mlp_scale.weight", ".ls2")),
)
"""Names of the encoder in the publishers' own files, where queries, keys and values are one tensor."""
PERMUTED = (
    ("vision.encoder.table.weight", "1 p d -> (1 p) d"),
    ("vision.encoder.class_token.weight", "1 01 d -> (1 01 d)"),
)
TINY: dict[str, Any] = {
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
}
OTHER_FORM: dict[str, Any] = {
    "norm_type": "rms_norm",
    "use_qk_norm": False,
    "attention_bias": False,
    "use_mean_pooling": True,
    "use_mask_token": True,
    "use_absolute_position_embeddings": False,
}
"""Changes of TINY, to an encoder without biases, positions or a norm at the end."""


def unread(c: HFConfig, layers: str, tower: str = "vision_tower.") -> tuple[str, ...]:
    """Patterns of tensors that no layer reads: the layers after the state that is read and the norm after
    them, and a token of pretraining. `layers` is the checkpoint's name of the layers in its `tower`.
    """
    v = c.part("vision_config")
    depth, (read,) = v.take_count("num_hidden_layers", 24), states_read(c, v, -1)
    further = tuple(f"*{tower}{layers}{i}.*" for i in range(read, depth))
    return (
        *further,
        *((f"*{tower}layernorm.*",) if further else ()),
        f"*{tower}embeddings.mask_token",
    )


def vision(c: HFConfig, v: HFConfig, *, bias: bool = False) -> VisionSpec:
    """Spec of the encoder and its projector, from the model's config and the encoder's own.

    Args:
        bias: default of `attention_bias`.

    Raises:
        ConfigError: an unknown norm, several states that are read, or patches that cannot be merged.
    """
    c.take_only(vision_feature_select_strategy="default")  # drops the class token
    for key in ("image_seq_length", "ignore_index"):
        c.take(key, None)  # of the processor, and of the loss, which is computed as everywhere
    states, ratio = states_read(c, v, -1), c.take_number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio else 0
    if len(states) != 1 or not merge or 1 / merge != ratio:
        raise ConfigError(
            f"{c.name}: of the encoder the states {states} are read, at a downsample_ratio of {ratio}; "
            "expected one state, and one over a whole number"
        )
    (state,) = states
    projector = MLPProjectorSpec(projector_activation(c), merge=merge, norm=LayerNormSpec(1e-5))
    image_id = c.take_count("image_token_id", 151667, least=0)
    for key in ("use_mask_token", "layer_scale_init_value", "initializer_factor"):
        v.take(key, None)  # of pretraining, and of fresh weights
    v.fill({"hidden_act": "gelu", "intermediate_size": 4096})
    size, patch = _side(v, "image_size", 448), _side(v, "patch_size", 14)
    if size // patch % projector.merge:
        raise ConfigError(
            f"{v.name}: {size // patch} times {size // patch} patches of an image, of which "
            f"{projector.merge} times {projector.merge} make a token; expected a multiple"
        )
    norm_type, eps = v.take("norm_type", "layer_norm"), v.take_number("layer_norm_eps", 1e-6)
    if norm_type not in ("layer_norm", "rms_norm"):
        raise ConfigError(f"{v.name}: norm_type must be layer_norm or rms_norm, found {norm_type!r}")
    norm: NormSpec | LayerNormSpec = LayerNormSpec(eps) if norm_type == "layer_norm" else NormSpec(eps)
    width, depth = v.take_count("hidden_size", 1024), v.take_count("num_hidden_layers", 24)
    attention = whole_attention(
        v,
        width,
        v.take_count("num_attention_heads", 16),
        qkv_bias=v.take_flag("attention_bias", bias),
        qk_norm=QKNormSpec(NormSpec(1e-6), "all_heads") if v.take_flag("use_qk_norm", False) else None,
    )
    block = BlockSpec(attention, mlp(v, bias=True, gated=False), norm, "layer_scale")
    final = not v.take_flag("use_mean_pooling", True) and state == depth
    placed = v.take_flag("use_absolute_position_embeddings", True)
    return VisionSpec(
        width,
        PatchSpec(patch, channels=v.take_count("num_channels", 3), bias=True),
        (block,) * state,
        projector,
        image_id,
        position_table=CubicTable(size // patch) if placed else None,
        pictures=SquarePictures(size),
        norm_after=LayerNormSpec(eps) if final else None,
        class_token="first",
    )


def _side(v: HFConfig, key: str, default: int) -> int:
    """Side of a square given as one or two numbers."""
    found = v.take(key, default)
    sides = found if isinstance(found, list) else [found]
    if not sides or any(type(side) is not int or side < 1 or side != sides[0] for side in sides):
        raise ConfigError(f"{v.name}: {key} must be the side of a square, found {found!r}")
    return sides[0]
