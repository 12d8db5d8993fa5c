"""Gemma 4 (Google DeepMind, 2026): Gemma 4's text models with an encoder for images and videos of any size;
on sliding layers the tokens of one image attend to each other in both directions; the small models also hear,
by a conformer.
"""

from collections.abc import Callable
from dataclasses import replace

from liger_models.architectures.audio_encoders import gemma4 as sounds
from liger_models.architectures.common import unread_keys
from liger_models.architectures.common.images import language_model, with_spans
from liger_models.architectures.encoders import gemma4 as encoder
from liger_models.architectures.gemma4_text import NAMES
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AudioSpec, ModelSpec, VisionSpec


def carried(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the text model's unread tensors."""
    return tuple(f"*language_model.{name.removeprefix('model.')}" for name in unread_keys(text_part(c)))


@register(
    "gemma4",
    reference="Gemma4ForConditionalGeneration",
    vision=True,
    audio=True,
    layouts=tuple(
        Layout(
            NAMES,
            ("*.experts.*",),
            (("vision.encoder.patch_embed.weight", "d (h w c) -> d c h w"),),
            root=f"{root}language_model.",
            parts=(
                ("vision.", Layout(encoder.NAMES, root=root)),
                ("audio.", Layout(sounds.CONFORMER, root=root)),
            ),
        )
        for root in ("model.", "")
    ),
    carried=carried,
)
def gemma4(c: HFConfig) -> ModelSpec:
    c.take("vision_soft_tokens_per_image", None)  # read by the processor
    return with_media(c, encoder.vision, sounds.conformer)


def with_media(
    c: HFConfig,
    vision: Callable[..., VisionSpec],
    audio: Callable[[HFConfig, int], AudioSpec],
    *,
    attention: str | None = None,
) -> ModelSpec:
    """The language model with what `vision` builds of the config of images, and `audio` of that of sounds, if
    there is one; `attention` is the default of the config's `use_bidirectional_attention`.
    """
    text, hears = language_model(c), c.raw.get("audio_config") is not None
    for key in ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"):
        c.take(key, None)  # placed by the processor
    audio_id = c.take_count("audio_token_id", 258881, least=0)
    bidirectional = c.raw["text_config"].get("use_bidirectional_attention", attention) is not None
    of_images = vision(
        c.part("vision_config"),
        c.take_count("image_token_id", 258880, least=0),
        video_id=c.take_count("video_token_id", 258884, least=0),
        spans="images" if bidirectional else None,
        audio_id=audio_id if hears else None,
    )
    of_sounds = audio(c.part("audio_config"), audio_id) if hears else c.take("audio_config", None)
    return replace(with_spans(text, bidirectional), vision=of_images, audio=of_sounds)


# -- tests

for_tests(
    "gemma4",
    tiny={
        "text_config": {
            **find_architecture("gemma4_text").tiny,
            "model_type": "gemma4_text",
            "hidden_act": ...,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": encoder.TINY,
        "audio_config": sounds.TINY_CONFORMER,
        "image_token_id": 3,
        "video_token_id": 4,
        "audio_token_id": 7,
    },
    variants={
        "causal, not standardised, clipped": {
            "text_config": {"use_bidirectional_attention": None},
            "vision_config": {
                "standardize": False,
                "num_key_value_heads": 2,
                "use_clipped_linears": True,
            },
            "audio_config": {**sounds.TINY_CONFORMER, "use_clipped_linears": False},
        },
        "without sounds": {"audio_config": None},
    },
    skip={"field:VisionSpec.audio_id": "types of tokens are compared with it, see tests/audio"},
)
