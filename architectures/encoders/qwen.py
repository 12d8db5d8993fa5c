"""Encoders of the Qwen families (arXiv:2409.12191), for images and videos of any size: rotary embeddings by
row and column, and a merger of patches. ERNIE 4.5 VL's has the same layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from liger_models.architectures.common import activation, mlp
from liger_models.architectures.common.grouped_attention import check_groups
from liger_models.architectures.common.images import Names
from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_attention, patches
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    BlockSpec,
    LayerNormSpec,
    MLPSpec,
    NormSpec,
    PatchMergerSpec,
    ResamplerSpec,
    StretchedTable,
    TimeSpec,
    VisionSpec,
)

NAMES = (
    ("encoder.patch_embed.", "patch_embed.proj."),
    ("encoder.layers.", "blocks."),
    (".input_layernorm.", ".norm1."),
    (".post_attention_layernorm.", ".norm2."),
    (".self_attn.qkv_proj.", ".attn.qkv."),
    (".self_attn.o_proj.", ".attn.proj."),
    ("projector.norm.", "merger.ln_q."),
    ("projector.linear_1.", "merger.mlp.0."),
    ("projector.linear_2.", "merger.mlp.2."),
)
"""Names of the encoder and the projector in Qwen2.5-VL."""
TINY: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
NAMES_3 = (
    *(name for name in NAMES if not name[0].startswith("projector.")),
    ("encoder.table.", "pos_embed."),
    (".mlp.up_proj.", ".mlp.linear_fc1."),
    (".mlp.down_proj.", ".mlp.linear_fc2."),
    ("projector.", "merger."),
    ("deep.", "deepstack_merger_list."),
    (".linear_1.", ".linear_fc1."),
    (".linear_2.", ".linear_fc2."),
)
"""The same in Qwen3-VL."""
TINY_3 = {
    **TINY,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 40,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [1, 0],
}
_ERNIE = (
    *(name for name in NAMES if name[0].startswith(".")),
    *(*LINEAR_NAMES, ("patch_embed.", "patch_embed.proj."), ("norm_after.", "ln."), ("layers.", "blocks.")),
)
_RESAMPLER = (
    *(("resampler_model.linear.", "resampler_model.mlp."), ("spatial.", "spatial_linear.")),
    *(("resampler_model.norm.", "resampler_model.after_norm."), ("temporal.", "temporal_linear.")),
)


def _parts_of_ernie(tower: str, *inner: str) -> tuple[tuple[str, Layout], ...]:
    layers = zip((".linear_1.", ".linear_2.", ".norm."), inner, strict=True)
    names = (*_RESAMPLER, *((here, f".{there}.") for here, there in layers))
    return (
        ("vision.encoder.", Layout(_ERNIE, root=f"model.{tower}.")),
        ("vision.projector.", Layout(names, root="model.resampler_model.")),
    )


RELEASED_ERNIE = _parts_of_ernie("vision_model", "0", "2", "3")
"""Layouts of ERNIE 4.5 VL's encoder and its resampler in checkpoints."""
IN_MEMORY_ERNIE = _parts_of_ernie("vision_tower", "fc1", "fc2", "ln")
"""The same in transformers' modules."""
LINEAR_PATCHES = (("vision.encoder.patch_embed.weight", "d (c h w) -> d c h w"),)
"""`permuted` of a `Layout`: the patch embedding is a linear layer."""
TINY_ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_vl_moe_vision",
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 3,
    "intermediate_size": 40,
    "hidden_act": "quick_gelu",
    "rms_norm_eps": 2e-3,
}


def layouts(names: Names) -> tuple[Layout, ...]:
    """Layouts of the hub, and of transformers' modules."""
    packed = ("vision.encoder.layers.*.qkv_proj.*",)
    return tuple(
        Layout(whole=packed, root=root, parts=(("vision.", Layout(names, root=vision)),))
        for root, vision in (("model.", "visual."), ("model.language_model.", "model.visual."))
    )


def grid_vision(
    c: HFConfig,
    v: HFConfig,
    hidden_size: int,
    block: BlockSpec,
    norm: NormSpec | LayerNormSpec,
    *,
    depth: int = 32,
    patch_size: int = 14,
    patch_bias: bool = False,
    merged: int | None = None,
    **settings: Any,
) -> VisionSpec:
    """An encoder of images of any size, as in the Qwen families: see `VisionSpec`.

    Args:
        c, v: the config, and the encoder's.
        hidden_size, block, norm: the encoder's width, its layers, and the norm before the projector.
        depth, patch_size: defaults.
        patch_bias: whether the patch embedding has a bias.
        merged: width of merged patches, if a linear layer follows.
        settings: other fields of the spec.
    """
    for key in ("vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        c.take(key, None)  # inserted by the processor
    return VisionSpec(
        hidden_size,
        patches(v, patch_size, patch_bias),
        (block,) * v.take_count("depth", depth),
        PatchMergerSpec(v.take_count("spatial_merge_size", 2), norm, size=merged),
        c.take_count("image_token_id", 151655, least=0),
        c.take_count("video_token_id", 151656, least=0),
        kinds="mm_token_type_ids",
        **settings,
    )


def windowed_vision(
    c: HFConfig, v: HFConfig, text_size: int | None, kv_heads: int | None = None
) -> VisionSpec:
    """The encoder of Qwen2.5-VL: gated MLPs, and windows in most layers.

    Args:
        c, v: the config, and the encoder's.
        text_size: width of the language model; None: a linear layer follows, from a width of its own.
        kv_heads: number of key/value heads; default: as many as there are heads.

    Raises:
        ConfigError: invalid numbers of heads.
    """
    width, norm = v.take_count("hidden_size", 3584), NormSpec(eps=1e-6)
    mlp = MLPSpec(v.take_count("intermediate_size", 3420), activation(v), bias=True)
    heads = v.take_count("num_heads", 16)
    attention = replace(axial_attention(v, width, heads), num_key_value_heads=kv_heads or heads)
    check_groups(v, heads, attention.num_key_value_heads)
    whole = v.take_layers("fullatt_block_indexes", [7, 15, 23, 31])
    merged = v.take_count("out_hidden_size", 3584) if text_size is None else None
    if text_size is not None:
        v.take_only(out_hidden_size=text_size)
    vision = grid_vision(
        c,
        v,
        width,
        BlockSpec(attention, mlp, norm),
        norm,
        merged=merged,
        windowed=tuple(i for i in range(v.take_count("depth", 32)) if i not in whole),
    )
    side = v.take_count("window_size", 112) // vision.projector.merge // vision.patches.size
    return replace(vision, window=side)


def stretched_vision(c: HFConfig, v: HFConfig, text_size: int) -> VisionSpec:
    """The encoder of Qwen3-VL, without features of lower layers: grids with a stretched position table.

    Args:
        c, v: the config, and the encoder's.
        text_size: width of the language model.
    """
    width, norm = v.take_count("hidden_size", 1152), LayerNormSpec(eps=1e-6)
    v.fill({"hidden_act": "gelu_pytorch_tanh"})
    mlp = MLPSpec(v.take_count("intermediate_size", 4304), activation(v, gated=False), bias=True, gated=False)
    v.take_only(out_hidden_size=text_size)
    return grid_vision(
        c,
        v,
        width,
        BlockSpec(axial_attention(v, width, v.take_count("num_heads", 16)), mlp, norm),
        norm,
        depth=27,
        patch_size=16,
        patch_bias=True,
        positions=TimeSpec(steps_apart=True),
        position_table=StretchedTable(math.isqrt(v.take_count("num_position_embeddings", 2304))),
    )


def resampled_vision(c: HFConfig, v: HFConfig, norm: NormSpec) -> VisionSpec:
    """The encoder of ERNIE 4.5 VL: Qwen2-VL's layers, and a resampler that makes a token of four patches, in
    videos of eight.

    Args:
        c, v: the config, and the encoder's.
        norm: of the language model.
    """
    v.fill({"hidden_act": "quick_gelu", "intermediate_size": 5120})
    v.take_only(temporal_merge_size=2)
    width, inner = v.take_count("hidden_size", 1280), LayerNormSpec(v.take_number("rms_norm_eps", 1e-6))
    attention = axial_attention(v, width, v.take_count("num_heads", 16))
    framing = {
        **{"image_start_token_id": 101304, "image_end_token_id": 101305},
        **{"video_start_token_id": 101306, "video_end_token_id": 101307},
    }
    first, last, first_of_video, last_of_video = (c.take_count(*key, least=0) for key in framing.items())
    return VisionSpec(
        width,
        patches(v, 14, bias=False, frames=1),
        (BlockSpec(attention, mlp(v, bias=True, gated=False), inner),) * v.take_count("depth", 32),
        ResamplerSpec(v.take_count("spatial_merge_size", 2), inner, norm),
        c.take_count("image_token_id", 100295, least=0),
        c.take_count("video_token_id", 103367, least=0),
        positions=TimeSpec(),
        norm_after=inner,
        kinds="mm_token_type_ids",
        framing_ids=(first, last, first_of_video, last_of_video),
    )
