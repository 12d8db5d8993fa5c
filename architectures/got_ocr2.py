"""GOT-OCR 2.0 (StepFun, 2024, arXiv:2409.01704): a small Qwen2 for reading documents, with SAM's encoder and
convolutions; sixteen patches of a square image make a token.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, vision_layouts
from liger_models.architectures.encoders import sam
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "got_ocr2",
    reference="GotOcr2ForConditionalGeneration",
    vision=True,
    layouts=vision_layouts(
        {
            "vision.encoder.": ("vision_tower.", sam.NAMES),
            "vision.projector.neck.": ("vision_tower.neck.", ()),
            "vision.projector.": ("multi_modal_projector.", ()),
        },
        whole=sam.WHOLE,
        permuted=sam.PERMUTED,
    ),
)
def got_ocr2(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    c.take("image_seq_length", None)  # read by the processor
    image_id = c.take_count("image_token_index", 151859, least=0)
    return replace(text, vision=sam.vision(c.part("vision_config"), image_id))


# -- tests

for_tests(
    "got_ocr2",
    tiny={
        "text_config": {**find_architecture("qwen2").tiny, "model_type": "qwen2"},
        "vision_config": sam.TINY,
        "image_token_index": 3,
        "tie_word_embeddings": True,
    },
    variants={"without biases of queries": {"vision_config": {"qkv_bias": False}}},
)
