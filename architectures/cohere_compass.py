"""North Micro Vision (Cohere, 2026): Command R7B's parallel blocks, with separate rotary settings, or none,
for each type of layer, with the encoder of Qwen3-VL for images and videos of any size.
"""

from dataclasses import replace

from liger_models.architectures.cohere_compass_text import TINY as TEXT
from liger_models.architectures.common import FULL, SLIDING
from liger_models.architectures.common.images import language_model, with_interleaved_axes
from liger_models.architectures.encoders.qwen import TINY_3
from liger_models.architectures.qwen3_vl import LAYOUT, SKIP, deep_vision
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "cohere_compass",
    reference="CohereCompassForConditionalGeneration",
    vision=True,
    layouts=(replace(LAYOUT, whole=LAYOUT.whole[:1], rename=()),),
    defaults={"image_token_id": 255031, "video_token_id": 255032},
    unread={"fusion_config": "says how the encoder was trained"},
)
def cohere_compass(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    vision = deep_vision(c, text)
    for layer_type in (FULL, SLIDING):
        text = with_interleaved_axes(c, text, (24, 20, 20), layer_type)
    return replace(text, vision=vision)


# -- tests

OF_FULL = {**TEXT["rope_parameters"][FULL], "mrope_section": [3, 2, 1]}
OF_SLIDING = {**TEXT["rope_parameters"][SLIDING], "mrope_section": [2, 2, 2], "mrope_interleaved": True}

for_tests(
    "cohere_compass",
    tiny={
        "text_config": {
            "model_type": "cohere_compass_text",
            **TEXT,
            "rope_parameters": {FULL: OF_FULL, SLIDING: OF_SLIDING},
        },
        "vision_config": {"model_type": "cohere_compass_vision", **TINY_3},
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": True,
    },
    variants={
        "full layers without positions": {
            "text_config": {"rope_parameters": {FULL: None, SLIDING: OF_SLIDING}}
        },
    },
    skip=SKIP,
)
