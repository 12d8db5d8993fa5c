"""LightOnOCR (LightOn, 2025): Qwen3 that reads pages, with the encoder of Pixtral and the projector of
Mistral Small 3.1.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import pixtral
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import MistralMergerSpec, ModelSpec

NAMES = (
    *pixtral.NAMES,
    ("vision_tower.", "vision_encoder."),
    ("projector.merging_layer.", "projector.patch_merger.merging_layer."),
    ("projector.", "vision_projection."),
)


@register(
    "lighton_ocr",
    reference="LightOnOcrForConditionalGeneration",
    vision=True,
    layouts=(Layout(root="model.language_model.", parts=(("vision.", Layout(NAMES, root="model.")),)),),
)
def lighton_ocr(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    merger = MistralMergerSpec(c.take_count("spatial_merge_size", 2), text.last_norm)
    image_id = c.take_count("image_token_id", 151655, least=0)
    return replace(text, vision=pixtral.vision(c.part("vision_config"), merger, image_id))


# -- tests

for_tests(
    "lighton_ocr",
    tiny={
        "text_config": {**find_architecture("qwen3").tiny, "model_type": "qwen3", "rms_norm_eps": 3e-3},
        "vision_config": pixtral.TINY,
        "image_token_id": 3,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    },
    variants={"three by three": {"spatial_merge_size": 3}},
)
