"""MiniCPM-V 4.6 (OpenBMB, 2026): Qwen3.5 with an encoder for images, slices of images and frames of videos,
of any size, which merges patches between two of its layers. `minicpm_ocr` is MiniCPM-OCR, which does not.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import siglip2 as encoder
from liger_models.architectures.qwen3_5_text import TINY as TEXT
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

LAYOUT = Layout(
    root="model.language_model.", parts=(("vision.", Layout(encoder.STRIP_NAMES, root="model.")),)
)


def registration(mode: str) -> dict[str, Any]:
    """Arguments of `register` for the families with this encoder; `mode` is the default of
    `downsample_mode`.
    """
    return {
        "layouts": (LAYOUT,),
        "carried": partial(encoder.unread_tensors, mode=mode),
        "unread": encoder.UNREAD_STRIPS,
    }


@register(
    "minicpmv4_6", reference="MiniCPMV4_6ForConditionalGeneration", vision=True, **registration(encoder.WHOLE)
)
def minicpmv4_6(c: HFConfig) -> ModelSpec:
    return replace(language_model(c), vision=encoder.strip_vision(c, c.part("vision_config"), encoder.WHOLE))


@register(
    "minicpm_ocr",
    reference="MiniCPMOcrForConditionalGeneration",
    vision=True,
    **registration(encoder.DETAILED),
)
def minicpm_ocr(c: HFConfig) -> ModelSpec:
    """MiniCPM-OCR (OpenBMB, 2026): MiniCPM-V 4.6 whose tokens keep the detail of documents: four patches each
    instead of sixteen.
    """
    return replace(
        language_model(c), vision=encoder.strip_vision(c, c.part("vision_config"), encoder.DETAILED)
    )


# -- tests

TINY = {
    "text_config": {"model_type": "qwen3_5_text", **TEXT},
    "vision_config": encoder.TINY_STRIPS,
    "image_token_id": 3,
    "video_token_id": 4,
    "insert_layer_id": 1,
}
NO_COPY = {"published:config": "no copy was at hand"}

for_tests(
    "minicpmv4_6",
    tiny={**TINY, "tie_word_embeddings": False},
    variants={"detailed": {"downsample_mode": encoder.DETAILED}, "merged first": {"insert_layer_id": 0}},
)
for_tests(
    "minicpm_ocr",
    tiny=TINY,
    variants={"merged": {"downsample_mode": encoder.WHOLE}},
    skip=NO_COPY,
)
