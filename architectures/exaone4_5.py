"""EXAONE 4.5 (LG AI Research, 2026): EXAONE 4 with Qwen2.5-VL's encoder for images and videos of any size,
here with grouped-query attention.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders.qwen import NAMES, TINY, layouts, windowed_vision
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "exaone4_5",
    reference="Exaone4_5_ForConditionalGeneration",
    vision=True,
    layouts=layouts(NAMES)[1:],
    carried=lambda c: ("mtp.*",),
    defaults={"image_token_id": 67, "video_token_id": 68},
)
def exaone4_5(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    vision = windowed_vision(c, v, text.hidden_size, v.take_count("num_key_value_heads", 8))
    return replace(text, vision=replace(vision, kinds=None))  # positions are counted as in text


# -- tests

for_tests(
    "exaone4_5",
    tiny={
        "text_config": {
            "model_type": "exaone4",
            "sliding_window": 19,
            "sliding_window_pattern": 2,
            "hidden_size": 64,
        },
        "vision_config": {
            **TINY,
            "model_type": "exaone4_5_vision",
            "hidden_act": "silu",
            "intermediate_size": 40,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "window_size": 12,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": False,
    },
    skip={"published:config": "no copy was at hand"},
)
