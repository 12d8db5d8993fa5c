"""Encoders of CLIP (arXiv:2103.00020) and SigLIP (arXiv:2303.15343), for square images: LayerNorm, plain
MLPs, a position table, and CLIP's class token. Hunyuan-VL's and Phi-4-multimodal's (arXiv:2503.01743, section
2.1.1) have SigLIP's layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from liger_models.architectures.common import activation, mlp
from liger_models.architectures.common.images import Names, tower_layouts
from liger_models.architectures.encoders.parts import LINEAR_NAMES, patches, states_read, whole_attention
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AnyresPictures,
    BilinearTable,
    BlockSpec,
    FixedTable,
    FractionTable,
    GridPictures,
    LayerNormSpec,
    MaskedPictures,
    NormSpec,
    PartlyHiddenTiles,
    PatchSpec,
    PlaceSpec,
    ProjectorSpec,
    RowsProjectorSpec,
    SquarePictures,
    TileRowsSpec,
    VisionSpec,
)

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
_SIZES = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {**_SIZES, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    SIGLIP: {**_SIZES, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
TINY_SIGLIP: dict[str, Any] = {
    "model_type": SIGLIP,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 10,
    "patch_size": 3,
    "layer_norm_eps": 2e-5,
}
TINY_CLIP = {**TINY_SIGLIP, "model_type": CLIP, "num_hidden_layers": 3, "image_size": 7}
_UNREAD = (
    "projection_dim",
    "projector_hidden_act",
    "vision_use_head",
    "vocab_size",
    "num_image_tokens",
    "num_positions",
    "initializer_factor",
)
"""Keys of other parts of models with these encoders, or of initialisation."""


def tower(c: HFConfig, kinds: Collection[str]) -> HFConfig:
    """Config of the encoder, which must be one of `kinds`; the first is the default.

    Raises:
        ConfigError: no encoder, or another kind.
    """
    v = c.part("vision_config")
    kind = v.model_type if "model_type" in c.raw["vision_config"] else next(iter(kinds))
    if kind not in kinds:
        raise ConfigError(
            f"{v.name}: the encoder is of the type {abbreviate(kind)}; supported are {', '.join(kinds)}"
        )
    v.model_type = kind
    v.fill(_DEFAULTS[kind])
    for key in _UNREAD:
        v.take(key, None)
    c.take_only(ignore_index=-100)
    return v


def vision(
    v: HFConfig,
    projector: ProjectorSpec,
    image_id: int,
    states: Sequence[int] = (),
    pictures: SquarePictures | AnyresPictures | MaskedPictures | None = None,
    **settings: Any,
) -> VisionSpec:
    """An encoder of square images.

    Args:
        v: its config, from `tower`.
        projector, image_id: the projector, and the placeholder id of image tokens.
        states: layers whose outputs go to the projector, see `states_read`; by default the last, normalised.
        pictures: form of the processor's output, if not plain images.
        settings: other fields of the spec.

    Raises:
        ConfigError: the width is not a multiple of the heads.
    """
    width, depth = v.take_count("hidden_size"), v.take_count("num_hidden_layers")
    attention = whole_attention(v, width, v.take_count("num_attention_heads"))
    clip, norm = v.model_type == CLIP, LayerNormSpec(eps=v.take_number("layer_norm_eps"))
    size, patch = v.take_count("image_size"), v.take_count("patch_size")
    last_alone = len(states) == 1 and states[0] > 0
    return VisionSpec(
        width,
        PatchSpec(patch, channels=v.take_count("num_channels", 3), bias=not clip),
        (BlockSpec(attention, mlp(v, bias=True, gated=False), norm),) * (max(states) if states else depth),
        projector,
        image_id,
        position_table=FixedTable(size // patch),
        pictures=pictures or SquarePictures(size),
        norm_before=norm if clip else None,
        norm_after=None if states else norm,
        class_token="first" if clip else None,
        taken=() if last_alone else tuple(states),
        **settings,
    )


def unread_tensors(
    c: HFConfig, v: HFConfig, default: int | list[int], older: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Patterns of the encoder's unused tensors: of layers after those in use (see `states_read`), and of the
    final norm.
    """
    read, depth = max(states_read(c, v, default, older)), v.take_count("num_hidden_layers")
    layers = tuple(f"*vision_tower.*layers.{i}.*" for i in range(read, depth))
    return (*layers, "*vision_tower.*post_layernorm.*", *HEAD)


HEAD = ("*vision_tower.head.*", "*vision_tower.vision_model.head.*", "*embeddings.position_ids")
"""SigLIP's pooling head, and a buffer of older files."""

NAMES = (
    ("patch_embed.", "embeddings.patch_embedding."),
    ("table.", "embeddings.position_embedding."),
    ("class_token.weight", "embeddings.class_embedding"),
    ("norm_before.", "pre_layrnorm."),
    ("norm_after.", "post_layernorm."),
    ("layers.", "encoder.layers."),
    (".input_layernorm.", ".layer_norm1."),
    (".post_attention_layernorm.", ".layer_norm2."),
    (".o_proj.", ".out_proj."),
    *LINEAR_NAMES,
)
"""Names of the encoder, after `vision_tower.` and, in the hub's layouts, `vision_model.`."""


def layouts(projector: Names = (), permuted: Names = ()) -> tuple[Layout, ...]:
    """Layouts of the hub, of transformers' checkpoints, and of its modules; see `tower_layouts`."""
    forms = (tower_layouts(NAMES, projector, permuted, inner) for inner in ("vision_model.", ""))
    return tuple(itertools.chain(*zip(*forms, strict=True)))


# -- Hunyuan-VL

_EMBEDDINGS = (
    ("encoder.patch_embed.", "embeddings.patch_embedding."),
    *(("encoder.table.", "embeddings.position_embedding."), ("encoder.layers.", "layers.")),
)
WITH_ROWS = (
    *(*_EMBEDDINGS, (".input_layernorm.", ".layer_norm1."), (".post_attention_layernorm.", ".layer_norm2.")),
    *(*LINEAR_NAMES, ("projector.", "patch_merger.")),
)
WITH_ROWS_RELEASED = (
    *(*_EMBEDDINGS, (".up_proj.", ".dense_h_to_4h."), (".down_proj.", ".dense_4h_to_h.")),
    *(("projector.", "perceive."), (".proj_conv.", ".proj.0."), (".proj_out.", ".proj.2.")),
)
_OF_PROCESSOR = (
    *("img_max_token_num", "max_vit_seq_len", "min_image_size", "out_hidden_size", "text_hidden_size"),
    "num_key_value_heads",
)


def vision_with_rows(c: HFConfig, v: HFConfig) -> VisionSpec:
    """The encoder of Hunyuan-VL: SigLIP's layers for images of any size, each row of which ends with a token.

    Raises:
        ConfigError: images smaller than a patch.
    """
    for key in _OF_PROCESSOR:
        v.take(key, None)  # or computed from others in the reference
    v.take_only(interpolate_mode="bilinear", temporal_patch_size=1)
    v.fill({"hidden_act": "gelu", "intermediate_size": 4304})
    width, patch = v.take_count("hidden_size", 1152), patches(v, 16, bias=True, frames=1)
    side, eps = v.take_count("max_image_size", 2048) // patch.size, v.take_number("rms_norm_eps", 1e-5)
    if not side:
        raise ConfigError(f"{v.name}: max_image_size is less than one patch of {patch.size} pixels")
    attention = whole_attention(v, width, v.take_count("num_attention_heads", 16))
    block = BlockSpec(attention, mlp(v, bias=True, gated=False), LayerNormSpec(eps))
    merge, act = v.take_count("spatial_merge_size", 2), activation(v, gated=False)
    return VisionSpec(
        width,
        patch,
        (block,) * v.take_count("num_hidden_layers", 27),
        RowsProjectorSpec(merge, NormSpec(eps=eps), act),
        c.take_count("image_token_id", 120120, least=0),
        positions=PlaceSpec(),
        position_table=BilinearTable(side, unread=1),
        pictures=GridPictures(raster=True),
        kinds="mm_token_type_ids",
    )


TINY_WITH_ROWS = {
    **{"model_type": "hunyuan_vl_vision", "hidden_size": 32, "intermediate_size": 40},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 3, "max_image_size": 16},
    **{"rms_norm_eps": 2e-3, "spatial_merge_size": 2},
}


# -- Phi-4-multimodal

NAMES_OF_TILES = (
    *((f"encoder.{here}", f"img_processor.{there}") for here, there in NAMES if not here.startswith(".")),
    *(pair for pair in NAMES if pair[0].startswith(".")),
    ("projector.linear_1.", "img_projection_up."),
    ("projector.linear_2.", "img_projection_down."),
    ("projector.ends.row_end", "sub_img_feature_extensor"),
    ("projector.ends.separator", "global_img_feature_extensor"),
)
"""Names of the encoder and the projector, after `image_embed.`."""
PERMUTED_OF_TILES = (
    ("vision.projector.ends.row_end", "1 1 1 d -> (1 1 1 d)"),
    ("vision.projector.ends.separator", "1 1 d -> (1 1 d)"),
)


def vision_of_tiles(v: HFConfig) -> VisionSpec:
    """Spec of the encoder, from its config.

    Raises:
        ConfigError: sizes that the reference cannot run, or an unsupported layer of features.
    """
    v.fill({"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304})
    width, depth = v.take_count("hidden_size", 1152), v.take_count("num_hidden_layers", 27)
    size, patch = v.take_count("image_size", 448), v.take_count("patch_size", 14)
    v.take_only(crop_size=size)
    if size % patch or size // patch % 2:
        raise ConfigError(
            f"{v.name}: image_size is {size} and patch_size {patch}; expected an even number of whole "
            "patches, two times two of which make a token"
        )
    attention = whole_attention(v, width, v.take_count("num_attention_heads", 16))
    block = BlockSpec(
        attention, mlp(v, bias=True, gated=False), LayerNormSpec(v.take_number("layer_norm_eps", 1e-6))
    )
    return VisionSpec(
        width,
        PatchSpec(patch, channels=v.take_count("num_channels", 3), bias=True),
        (block,) * _layers_read(v, depth),
        TileRowsSpec(),
        v.take_count("image_token_id", 200010, least=0),
        position_table=FractionTable(size // patch),
        pictures=PartlyHiddenTiles(size),
    )


def _layers_read(v: HFConfig, depth: int) -> int:
    """The number of layers up to the one whose output the projector reads, `feature_layer`.

    Raises:
        ConfigError: it is no output of a layer.
    """
    layer = v.take("feature_layer", -2)
    if type(layer) is not int or not (-depth <= layer < 0 or 0 < layer <= depth):
        raise ConfigError(
            f"{v.name}: feature_layer must be the output of one of the {depth} layers, from 1 to {depth} or "
            f"from -{depth} to -1, found {layer!r}"
        )
    return layer if layer > 0 else layer + depth + 1


def unread_of_tiles(v: HFConfig) -> tuple[str, ...]:
    """Patterns of the encoder's tensors that nothing reads: of later layers, of the norm after them, and of
    the pooling head.
    """
    depth = v.take_count("num_hidden_layers", 27)
    later = range(_layers_read(v, depth), depth)
    return (
        *(f"*img_processor.encoder.layers.{i}.*" for i in later),
        *("*img_processor.post_layernorm.*", "*img_processor.head.*"),
    )


TINY_OF_TILES: dict[str, Any] = {
    "model_type": "phi4_multimodal_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 12,
    "crop_size": 12,
    "patch_size": 3,
    "layer_norm_eps": 2e-5,
    "image_token_id": 3,
}
