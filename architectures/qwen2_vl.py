"""Qwen2-VL (Wang et al., 2024, arXiv:2409.12191): Qwen2 with an encoder for images and videos of any size,
and positions on three axes (M-RoPE).
"""

from dataclasses import replace

from liger_models.architectures.common import activation
from liger_models.architectures.common.images import language_model, with_axis_sections
from liger_models.architectures.encoders.parts import LINEAR_NAMES, axial_attention
from liger_models.architectures.encoders.qwen import NAMES, TINY, grid_vision, layouts
from liger_models.architectures.qwen2_5_vl import TINY_TEXT
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, MLPSpec, ModelSpec, TimeSpec


@register(
    "qwen2_vl",
    reference="Qwen2VLForConditionalGeneration",
    vision=True,
    layouts=layouts((*NAMES, *LINEAR_NAMES)),
)
def qwen2_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    width, norm = v.take_count("embed_dim", 1280), LayerNormSpec(eps=1e-6)
    v.fill({"hidden_act": "quick_gelu"})
    hidden = int(width * v.take_number("mlp_ratio", 4))
    mlp = MLPSpec(hidden, activation(v, gated=False), bias=True, gated=False)
    attention = axial_attention(v, width, v.take_count("num_heads", 16))
    v.take_only(hidden_size=text.hidden_size)
    vision = grid_vision(c, v, width, BlockSpec(attention, mlp, norm), norm, positions=TimeSpec())
    return replace(with_axis_sections(c, text, (16, 24, 24)), vision=vision)


# -- tests

for_tests(
    "qwen2_vl",
    tiny={
        "text_config": {**TINY_TEXT, "model_type": "qwen2_vl_text"},
        "vision_config": {
            **TINY,
            "model_type": "qwen2_vl_vision",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 2,
        },
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": False,
    },
)
