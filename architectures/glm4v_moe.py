"""GLM-4.5V and GLM-4.6V (GLM-V team, 2025, arXiv:2507.01006): GLM-4.5-Air with GLM-4.1V's encoder and
positions on three axes.
"""

from liger_models.architectures.common.deepseek import IN_GROUPS, TINY_EXPERTS, corrected_layouts
from liger_models.architectures.encoders import glm4v as encoder
from liger_models.architectures.glm4v import glm4v
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "glm4v_moe",
    reference="Glm4vMoeForConditionalGeneration",
    vision=True,
    layouts=tuple(map(encoder.layout, corrected_layouts())),
    carried=lambda c: encoder.further_layers(c, 46),
    defaults={"image_token_id": 151363},
)
def glm4v_moe(c: HFConfig) -> ModelSpec:
    return glm4v(c)


# -- tests

for_tests(
    "glm4v_moe",
    tiny={
        "text_config": {
            **TINY_EXPERTS,
            "model_type": "glm4v_moe_text",
            "hidden_size": 64,
            "rope_parameters": encoder.TINY_ROPE,
        },
        "vision_config": {"model_type": "glm4v_moe_vision", **encoder.TINY},
        "image_token_id": 3,
        "video_token_id": 4,
    },
    variants={"in groups": {"text_config": IN_GROUPS}},
    skip=encoder.SKIP_VIDEOS,
)
