"""Qwen2.5-VL (Bai et al., 2025, arXiv:2502.13923): Qwen2.5 with an encoder for images and videos of any size.
Most of the encoder's layers have windowed attention, positions have three axes, and four patches make a
token.
"""

from dataclasses import replace
from types import EllipsisType

from liger_models.architectures.common.images import language_model, with_axis_sections
from liger_models.architectures.encoders.qwen import NAMES, TINY, layouts, windowed_vision
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec, TimeSpec

TINY_TEXT: dict[str, object | EllipsisType] = {
    "model_type": "qwen2_5_vl_text",
    "head_dim": ...,
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "use_sliding_window": True,
    "sliding_window": 19,
    "max_window_layers": 2,
}


@register("qwen2_5_vl", reference="Qwen2_5_VLForConditionalGeneration", vision=True, layouts=layouts(NAMES))
def qwen2_5_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    vision = windowed_vision(c, v, text.hidden_size)
    rate = TimeSpec(v.take_number("tokens_per_second", 4))
    return replace(with_axis_sections(c, text, (16, 24, 24)), vision=replace(vision, positions=rate))


# -- tests

for_tests(
    "qwen2_5_vl",
    tiny={
        "text_config": TINY_TEXT,
        "vision_config": {
            **TINY,
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "intermediate_size": 40,
            "tokens_per_second": 3,
            "window_size": 12,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": False,
    },
)
