"""MiniCPM-V 4.7 (OpenBMB, 2026): MiniCPM-V 4.6 with positions on three axes, in which an image and its slices
lie on one canvas.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common.images import language_model, with_interleaved_axes
from liger_models.architectures.encoders import siglip2 as encoder
from liger_models.architectures.minicpmv4_6 import NO_COPY, registration
from liger_models.architectures.minicpmv4_6 import TINY as TINY_4_6
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import CanvasSpec, ModelSpec


@register(
    "minicpmv4_7", reference="MiniCPMV4_7ForConditionalGeneration", vision=True, **registration(encoder.WHOLE)
)
def minicpmv4_7(c: HFConfig) -> ModelSpec:
    names = "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"
    first, last, first_of_slice, last_of_slice, newline = (c.take_count(name, least=0) for name in names)
    vision = encoder.strip_vision(
        c,
        c.part("vision_config"),
        encoder.WHOLE,
        positions=CanvasSpec((first, last), (first_of_slice, last_of_slice), newline),
        kinds="mm_token_type_ids",
    )
    return replace(with_interleaved_axes(c, language_model(c), (11, 11, 10)), vision=vision)


# -- tests

TEXT: Any = TINY_4_6["text_config"]
MARKERS = {"image_start_id": 5, "image_end_id": 6, "slice_start_id": 7, "slice_end_id": 8, "newline_id": 2}
OWN = {
    "field:CanvasSpec.image_ids": "read where no image follows or precedes: tests/vision/test_canvas.py",
    "field:RopeSpec.frequencies": "the encoder's layers have no rotary positions, so there is no value",
}
for_tests(
    "minicpmv4_7",
    tiny={
        **TINY_4_6,
        **MARKERS,
        "text_config": {**TEXT, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [2, 1, 1]}},
        "tie_word_embeddings": False,
    },
    variants={"detailed": {"downsample_mode": encoder.DETAILED}},
    skip={**NO_COPY, **OWN},
)
