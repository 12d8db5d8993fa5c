"""Ovis2 (AIDC-AI, 2025, arXiv:2405.20797): Qwen2.5 with an encoder for square images, whose features are
weighted means of the embeddings of visual words.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import ovis2 as encoder
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "ovis2",
    reference="Ovis2ForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            root="model.language_model.",
            parts=(
                ("vision.encoder.", Layout(encoder.NAMES, root="model.vision_tower.transformer.")),
                ("vision.projector.table.", Layout(encoder.TABLE, root="model.")),
                ("vision.projector.", Layout(root="model.vision_tower.head_")),
            ),
        ),
    ),
)
def ovis2(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    c.take_only(hidden_size=text.hidden_size, vocab_size=text.vocab_size)
    return replace(text, vision=encoder.vision(c, c.part("vision_config")))


# -- tests

for_tests(
    "ovis2",
    tiny={
        "text_config": {**find_architecture("qwen2").tiny, "model_type": "qwen2"},
        "vision_config": encoder.TINY,
        "image_token_id": 3,
        "visual_indicator_token_ids": [5, 6, 7],
        "hidden_size": 48,
        "vocab_size": 131,
        "tie_word_embeddings": True,
    },
    variants={
        "biases, each patch a token": {
            "vision_config": {"qkv_bias": True, "mlp_bias": True, "hidden_stride": 1},
        }
    },
)
