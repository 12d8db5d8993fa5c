"""Qwen2.5-VL (Bai et al., 2025, arXiv:2502.13923): Qwen2.5 that sees images and videos of all sizes. Most
layers of its encoder look through windows, positions have three axes, and four patches make a token.
"""

from dataclasses import replace
from types import EllipsisType

from liger_models.architectures.common import activation, take_only
from liger_models.architectures.common.images import (
    encoder_attention,
    grid_vision,
    language_model,
    turned_by_axes,
)
from liger_models.architectures.registry import register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.spec import (
    BlockSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    TimeSpec,
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
"""Of the encoder and the way out of it, in Qwen2-VL too."""


def layouts(names: tuple[tuple[str, str], ...]) -> tuple[Layout, ...]:
    """As the hub has it, and as transformers builds it."""
    packed = ("vision.encoder.layers.*.qkv_proj.*",)
    return tuple(
        Layout(whole=packed, root=root, parts=(("vision.", Layout(names, root=vision)),))
        for root, vision in (("model.", "visual."), ("model.language_model.", "model.visual."))
    )


TINY_TEXT: dict[str, object | EllipsisType] = {
    "model_type": "qwen2_5_vl_text",
    "head_dim": ...,
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "use_sliding_window": True,
    "sliding_window": 19,
    "max_window_layers": 2,
}
TINY_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "hidden_act": "silu",
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "tokens_per_second": 3,
    "window_size": 12,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 64,
}


@register(
    "qwen2_5_vl",
    reference="Qwen2_5_VLForConditionalGeneration",
    tiny={
        "text_config": TINY_TEXT,
        "vision_config": {"model_type": "qwen2_5_vl_vision", **TINY_VISION},
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": False,
    },
    layouts=layouts(NAMES),
)
def qwen2_5_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    width, norm = v.take_count("hidden_size", 3584), NormSpec(eps=1e-6)
    mlp = MLPSpec(v.take_count("intermediate_size", 3420), activation(v), bias=True)
    attention = encoder_attention(v, width, v.take_count("num_heads", 16))
    whole = v.take("fullatt_block_indexes", [7, 15, 23, 31])
    take_only(v, out_hidden_size=text.hidden_size)
    vision = grid_vision(
        c,
        v,
        width,
        BlockSpec(attention, mlp, norm),
        norm,
        positions=TimeSpec(v.take_number("tokens_per_second", 4)),
        windowed=tuple(i for i in range(v.take_count("depth", 32)) if i not in whole),
    )
    side = v.take_count("window_size", 112) // vision.projector.merge // vision.patches.size
    return replace(turned_by_axes(c, text, (16, 24, 24)), vision=replace(vision, window=side))
