"""Qwen3.5 with experts (Qwen Team, 2026): Qwen3.5 with many small experts and a gated shared expert in every
layer, with its encoder for images and videos.
"""

from dataclasses import replace

from liger_models.architectures.common import mtp
from liger_models.architectures.qwen3_5 import ROPE, TOKENS, VISION, qwen3_5
from liger_models.architectures.qwen3_5_text import TINY as TEXT
from liger_models.architectures.qwen3_next import EXPERTS
from liger_models.architectures.qwen3_vl import LAYOUT, SKIP
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "qwen3_5_moe",
    reference="Qwen3_5MoeForConditionalGeneration",
    vision=True,
    layouts=(replace(LAYOUT, whole=LAYOUT.whole[:1]), LAYOUT),  # experts by themselves, and packed
    defaults={"image_token_id": 248056, "video_token_id": 248057},
    carried=lambda c: ("mtp.*",),
    mtp=mtp.QWEN,
)
def qwen3_5_moe(c: HFConfig) -> ModelSpec:
    return qwen3_5(c)


# -- tests

TEXT_WITH_EXPERTS = {**TEXT, **EXPERTS, "intermediate_size": ..., "rope_parameters": ROPE}

for_tests(
    "qwen3_5_moe",
    tiny={
        "text_config": {"model_type": "qwen3_5_moe_text", **TEXT_WITH_EXPERTS},
        "vision_config": {"model_type": "qwen3_5_moe_vision", **VISION},
        **TOKENS,
    },
    skip=SKIP,
)
