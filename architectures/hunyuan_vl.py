"""Hunyuan-VL (Tencent, 2025): Hunyuan with an encoder for images of any size, whose rows end with a learned
token, and positions on four axes: the count, column, row, and the number of the image.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, with_axes_of_dimensions
from liger_models.architectures.encoders import clip as encoder
from liger_models.architectures.hunyuan import NORMS
from liger_models.architectures.hunyuan import TINY as TEXT
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "hunyuan_vl",
    reference="HunYuanVLForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            NORMS,
            parts=(("vision.", Layout(encoder.WITH_ROWS_RELEASED, root="vit.")),),
        ),
        Layout(
            NORMS,
            root="model.language_model.",
            parts=(("vision.", Layout(encoder.WITH_ROWS, root="model.vision_tower.")),),
        ),
    ),
    carried=lambda c: ("*.image_sep",),
    images_by_document=True,
)
def hunyuan_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    return replace(with_axes_of_dimensions(c, text), vision=encoder.vision_with_rows(c, v))


# -- tests

for_tests(
    "hunyuan_vl",
    tiny={
        "text_config": {
            **TEXT,
            "model_type": "hunyuan_vl_text",
            "rope_parameters": {
                **{"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
                "mrope_section": [2, 1, 3, 2],
            },
        },
        "vision_config": encoder.TINY_WITH_ROWS,
        "image_token_id": 3,
        "tie_word_embeddings": False,
    },
    skip={
        "field:RopeSpec.frequencies": "the encoder's layers have no rotary positions, so there is no value"
    },
)
