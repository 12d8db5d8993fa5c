"""Gemma 4 12B (Google DeepMind, 2026): Gemma 4's language model over patches of images and videos and
pieces of waveforms, without encoders; on sliding layers the tokens of one image attend to each other in both
directions.
"""

from liger_models.architectures.audio_encoders import gemma4 as sounds
from liger_models.architectures.encoders import gemma4 as encoder
from liger_models.architectures.gemma4 import carried, with_media
from liger_models.architectures.gemma4_text import NAMES
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "gemma4_unified",
    reference="Gemma4UnifiedForConditionalGeneration",
    vision=True,
    audio=True,
    layouts=tuple(
        Layout(
            NAMES,
            permuted=encoder.UNIFIED_PERMUTED,
            root="model.language_model.",
            parts=(
                ("vision.", Layout(names, root="model.")),
                ("audio.", Layout(sounds.NAMES, root="model.")),
            ),
        )
        for names in (encoder.UNIFIED, encoder.UNIFIED_IN_MODULES)
    ),
    carried=carried,
    masks_of_generation=True,  # its forward pass shows image tokens to one another in full layers, too
)
def gemma4_unified(c: HFConfig) -> ModelSpec:
    return with_media(c, encoder.patches_alone, sounds.waveforms, attention="vision")


# -- tests

SMALL_ONLY = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
EXPERTS = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
for_tests(
    "gemma4_unified",
    tiny={
        "text_config": {
            **find_architecture("gemma4_text").tiny,
            **dict.fromkeys((*SMALL_ONLY, *EXPERTS), ...),
            "model_type": "gemma4_unified_text",
            "hidden_act": ...,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": encoder.UNIFIED_TINY,
        "audio_config": sounds.TINY,
        "image_token_id": 3,
        "video_token_id": 4,
        "audio_token_id": 7,
    },
    variants={
        "causal": {"text_config": {"use_bidirectional_attention": None}},
        "without sounds": {"audio_config": None},
    },
    skip={
        "field:LinearProjectorSpec.concatenated": "a patch is a token",
        "field:VisionSpec.audio_id": "types of tokens are compared with it, see tests/audio",
    },
)
