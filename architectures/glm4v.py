"""GLM-4.1V (GLM-V team, 2025, arXiv:2507.01006): GLM-4-0414 with an encoder for images of any size and
positions on three axes. `glm46v` is GLM-4.6V-Flash, which computes the same.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, with_axis_sections
from liger_models.architectures.encoders import glm4v as encoder
from liger_models.architectures.glm import GLM4
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register("glm4v", reference="Glm4vForConditionalGeneration", vision=True, layouts=(encoder.layout(GLM4),))
def glm4v(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    vision = encoder.vision(c, v, text.hidden_size)
    return replace(with_axis_sections(c, text, (8, 12, 12)), vision=vision)


@register("glm46v", reference="Glm46VForConditionalGeneration", vision=True, layouts=(encoder.layout(GLM4),))
def glm46v(c: HFConfig) -> ModelSpec:
    """GLM-4.6V-Flash (Z.ai, 2025): the same as GLM-4.1V."""
    return glm4v(c)


# -- tests

for family in ("glm4v", "glm46v"):
    for_tests(
        family,
        tiny={
            "text_config": {
                "model_type": "glm4v_text",
                "head_dim": ...,
                "num_key_value_heads": 2,
                "hidden_size": 64,
                "rope_parameters": encoder.TINY_ROPE,
            },
            "vision_config": {"model_type": "glm4v_vision", **encoder.TINY},
            "image_token_id": 3,
            "video_token_id": 4,
        },
        skip={
            **encoder.SKIP_VIDEOS,
            **({} if family == "glm4v" else {"published:config": "it computes the same as glm4v"}),
        },
    )
