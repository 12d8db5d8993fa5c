"""Phi-4-multimodal (Microsoft, 2025, arXiv:2503.01743): Phi-4-mini with SigLIP for images, as tiles with
padding, and a conformer for sounds, which have a projection of their own next to images.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import phi4_multimodal as sounds
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.phi3 import longrope_factors
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

EXTEND = "model.embed_tokens_extend."


@register(
    "phi4_multimodal",
    reference="Phi4MultimodalForCausalLM",
    vision=True,
    audio=True,
    layouts=(
        Layout(
            whole=("layers.*.qkv_proj.*", "layers.*.gate_up_proj.*"),
            permuted=clip.PERMUTED_OF_TILES,
            joined=(Joined("gate_up_proj", ("up_proj", "gate_proj"), within="audio."),),
            parts=(
                ("vision.", Layout(clip.NAMES_OF_TILES, root=f"{EXTEND}image_embed.")),
                ("audio.", Layout(sounds.NAMES, root=f"{EXTEND}audio_embed.")),
            ),
        ),
    ),
    sounds_by_document=True,
    carried=lambda c: clip.unread_of_tiles(c.part("vision_config")),
)
def phi4_multimodal(c: HFConfig) -> ModelSpec:
    vision = clip.vision_of_tiles(c.part("vision_config"))
    audio = sounds.audio(c.part("audio_config"), vision.image_id)
    return replace(language_model(c), vision=vision, audio=audio)


# -- tests

for_tests(
    "phi4_multimodal",
    tiny={
        "hidden_size": 64,
        "head_dim": ...,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 256,
        "sliding_window": 80,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            **longrope_factors(6),
        },
        "vision_config": clip.TINY_OF_TILES,
        "audio_config": sounds.TINY,
    },
)
