"""Qwen4, experimental (Qwen Team, 2026): several residual streams with gates per channel, n-gram embeddings,
linear attention, and attention to blocks of keys that an indexer chooses, with Qwen3.5's encoder for images
and videos.
"""

from dataclasses import replace

from liger_models.architectures.qwen3_5 import TOKENS, VISION, qwen3_5
from liger_models.architectures.qwen3_vl import LAYOUT
from liger_models.architectures.qwen3_vl import SKIP as SKIP_VISION
from liger_models.architectures.qwen4_exp_text import TINY as TEXT
from liger_models.architectures.qwen4_exp_text import layouts
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "qwen4_exp",
    reference="Qwen4ExpForConditionalGeneration",
    vision=True,
    layouts=tuple(
        replace(one, whole=(*one.whole, *LAYOUT.whole[:1]), root=LAYOUT.root, parts=LAYOUT.parts)
        for one in layouts()
    ),
    defaults={"image_token_id": 248056, "video_token_id": 248057},
    carried=lambda c: ("mtp.*",),
)
def qwen4_exp(c: HFConfig) -> ModelSpec:
    return qwen3_5(c)


# -- tests

for_tests(
    "qwen4_exp",
    tiny={
        "text_config": {
            "model_type": "qwen4_exp_text",
            **TEXT,
            "seed": 6,  # with 5 a score of n-grams in the card's batch is near zero, where roots are steep
            "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [2, 1, 1]},
        },
        "vision_config": {"model_type": "qwen4_exp_vision", **VISION},
        **TOKENS,
    },
    skip=SKIP_VISION,
)
