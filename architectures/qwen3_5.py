"""Qwen3.5 (Qwen Team, 2026): hybrid language models of linear and gated attention, with the encoder of
Qwen3-VL for images and videos of any size.
"""

from dataclasses import replace

from liger_models.architectures.common import mtp
from liger_models.architectures.common.images import language_model, with_interleaved_axes
from liger_models.architectures.encoders.qwen import TINY_3, stretched_vision
from liger_models.architectures.qwen3_5_text import TINY as TEXT
from liger_models.architectures.qwen3_vl import LAYOUT, SKIP
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "qwen3_5",
    reference="Qwen3_5ForConditionalGeneration",
    vision=True,
    layouts=(LAYOUT,),
    defaults={"image_token_id": 248056, "video_token_id": 248057},
    carried=lambda c: ("mtp.*",),
    mtp=mtp.QWEN,
)
def qwen3_5(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    vision = stretched_vision(c, c.part("vision_config"), text.hidden_size)
    return replace(with_interleaved_axes(c, text, (11, 11, 10)), vision=vision)


# -- tests

VISION = {key: value for key, value in TINY_3.items() if key != "deepstack_visual_indexes"}
ROPE = {**TEXT["rope_parameters"], "mrope_section": [2, 1, 1]}
TOKENS = {"image_token_id": 3, "video_token_id": 4, "tie_word_embeddings": False}

for_tests(
    "qwen3_5",
    tiny={
        "text_config": {"model_type": "qwen3_5_text", **TEXT, "rope_parameters": ROPE},
        "vision_config": {"model_type": "qwen3_5_vision", **VISION},
        **TOKENS,
    },
    skip=SKIP,
)
