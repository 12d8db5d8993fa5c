"""Kimi K2.5 (Moonshot AI, 2026): DeepSeek-V3's layers with an encoder for images and short clips of any size,
whose frames attend to one another.
"""

from dataclasses import replace

from liger_models.architectures.common.deepseek import corrected_layouts
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import moonvit
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


def further_layers(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the layers for multi-token prediction, which do not run."""
    text = text_part(c)
    names = find_architecture(text.model_type).carried(text)
    return tuple(f"*language_model.{name}" for name in names)


@register(
    "kimi_k25",
    reference="Kimi_K25ForConditionalGeneration",
    vision=True,
    layouts=moonvit.layouts(corrected_layouts()),
    carried=further_layers,
)
def kimi_k25(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    return replace(text, vision=moonvit.vision(c, c.part("vision_config")))


# -- tests

ONE_STEP = "the reference's whole model takes only clips of one time step: tests/vision/test_clips.py"
for_tests(
    "kimi_k25",
    tiny={
        "text_config": {**find_architecture("deepseek_v3").tiny, "head_dim": ...},
        "vision_config": moonvit.TINY,
        "image_token_id": 3,
        "video_token_id": 4,
        "projection_hidden_size": 32,
        "projection_layer_norm_eps": 2e-3,
        "tie_word_embeddings": False,
    },
    skip={
        "published:config": "no copy was at hand",
        "field:VisionSpec.clips": ONE_STEP,
        "field:ClipTable.steps": ONE_STEP,
    },
)
