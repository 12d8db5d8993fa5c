"""Gemma 3n (Google DeepMind, 2025): Gemma 3n's text models with MobileNetV5 for images and a conformer for
sounds; images and sounds have vocabularies of their own, too.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import gemma3n as sounds
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import gemma4 as encoder
from liger_models.architectures.gemma3n_text import NAMES, unread
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import EmbedderSpec, ModelSpec


def carried(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the text model's unread tensors."""
    return tuple(f"*language_model.{name.removeprefix('model.')}" for name in unread(text_part(c)))


@register(
    "gemma3n",
    reference="Gemma3nForConditionalGeneration",
    vision=True,
    audio=True,
    layouts=tuple(
        Layout(
            NAMES,
            root=f"{root}language_model.",
            parts=(
                ("vision.encoder.", Layout(root=f"{root}vision_tower.timm_model.")),
                ("vision.projector.", Layout(sounds.EMBEDDER, root=f"{root}embed_vision.")),
                ("audio.encoder.", Layout(sounds.NAMES, root=f"{root}audio_tower.")),
                ("audio.projector.", Layout(sounds.EMBEDDER, root=f"{root}embed_audio.")),
            ),
        )
        for root in ("model.", "")
    ),
    carried=carried,
)
def gemma3n(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    for key in ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id"):
        c.take(key, None)  # placed by the processor
    audio = sounds.conformer(
        c.part("audio_config"),
        c.take_count("audio_token_id", 262273, least=0),
        tokens=c.take_count("audio_soft_tokens_per_image", 188),
        vocab_size=text.vocab_size,
    )
    of_images = sounds.embedder(v, 262144)
    assert isinstance(audio.projector, EmbedderSpec)
    if of_images.first_id + of_images.ids != audio.projector.first_id:
        raise ConfigError(
            f"{c.name}: the vocabulary of images ends before {of_images.first_id + of_images.ids}, and that "
            f"of sounds begins at {audio.projector.first_id}; expected the same"
        )
    vision = encoder.mobilenet(
        v,
        of_images,
        c.take_count("image_token_id", 262145, least=0),
        c.take_count("vision_soft_tokens_per_image", 256),
    )
    return replace(text, vision=vision, audio=audio)


# -- tests

for_tests(
    "gemma3n",
    tiny={
        "text_config": {
            **find_architecture("gemma3n_text").tiny,
            "model_type": "gemma3n_text",
            "hidden_act": ...,
        },
        "vision_config": encoder.TINY_MOBILENET,
        "audio_config": sounds.TINY,
        "image_token_id": 113,
        "vision_soft_tokens_per_image": 4,
        "audio_token_id": 123,
        "audio_soft_tokens_per_image": 6,
    },
    skip={
        "field:EmbedderSpec.padding_row": "of sounds, see tests/audio",
        "field:PyramidSpec.scale": "a norm follows: see tests/vision/test_mobilenet.py",
    },
)
