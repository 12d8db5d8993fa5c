"""GLM-OCR (Z.ai, 2026): a small model for reading documents, in the form of GLM-4.1V, with QK-norm in the
encoder.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, with_axis_sections
from liger_models.architectures.encoders import glm4v as encoder
from liger_models.architectures.glm import GLM4
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "glm_ocr",
    reference="GlmOcrForConditionalGeneration",
    vision=True,
    layouts=(encoder.layout(GLM4),),
    carried=lambda c: encoder.further_layers(c, 16),
    defaults={"image_token_id": 59280},
)
def glm_ocr(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    vision = encoder.ocr_vision(c, v, text.hidden_size)
    return replace(with_axis_sections(c, text, (8, 12, 12)), vision=vision)


# -- tests

for_tests(
    "glm_ocr",
    tiny={
        "text_config": {
            "model_type": "glm_ocr_text",
            "head_dim": 16,
            "hidden_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {"model_type": "glm_ocr_vision", **encoder.TINY, "out_hidden_size": 48},
        "image_token_id": 3,
        "video_token_id": 4,
    },
    variants={"no_biases": {"vision_config": {"attention_bias": False}}},
    skip={
        **encoder.SKIP_VIDEOS,
        "published:config": "no copy was at hand",
    },
)
