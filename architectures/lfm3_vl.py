"""LFM3-VL (Liquid AI, 2026): LFM3 with an encoder of convolutions and attention, for images and videos of any
size; four patches make a token.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import lfm3_vl as encoder
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "lfm3_vl",
    reference="Lfm3VlForConditionalGeneration",
    vision=True,
    layouts=tuple(
        replace(
            text,
            rename=(*text.rename, ("model.language_model.norm.", "model.language_model.embedding_norm.")),
            permuted=encoder.PERMUTED,
            root="model.language_model.",
            parts=(("vision.", Layout(names, root="model.")),),
        )
        for text, names in zip(
            find_architecture("lfm3").layouts, (encoder.RELEASED, encoder.NAMES), strict=True
        )
    ),
)
def lfm3_vl(c: HFConfig) -> ModelSpec:
    return replace(language_model(c), vision=encoder.vision(c, c.part("vision_config")))


# -- tests

for_tests(
    "lfm3_vl",
    tiny={
        "text_config": {**find_architecture("lfm3").tiny, "hidden_act": ..., "rms_norm_eps": ...},
        "vision_config": encoder.TINY,
        "image_token_id": 3,
        "video_token_id": 4,
        "projector_hidden_size": 28,
        "tie_word_embeddings": False,
    },
)
