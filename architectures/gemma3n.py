"""Gemma 3n (Google DeepMind, 2025): Gemma 3n's text models with MobileNetV5 for images and a conformer for
sounds; images and sounds have vocabularies of their own, too.
"""

import math
from dataclasses import replace

from liger_models.architectures.audio_encoders import gemma3n as sounds
from liger_models.architectures.common.images import language_model
from liger_models.architectures.gemma3n_text import NAMES, unread
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    EdgeBlockSpec,
    InvertedBlockSpec,
    ModelSpec,
    PatchSpec,
    ProjectorSpec,
    PyramidBlockSpec,
    PyramidSpec,
    QueryBlockSpec,
    SquarePictures,
    VisionSpec,
)

NAME, WIDTH = "mobilenetv5_300m_enc", 2048  # in timm
PATCH = 48  # pixels on a side, a token: three at the resolution of the fusion


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
    if of_images.first_id + of_images.ids != audio.projector.first_id:
        raise ConfigError(
            f"{c.name}: the vocabulary of images ends before {of_images.first_id + of_images.ids}, and that "
            f"of sounds begins at {audio.projector.first_id}; expected the same"
        )
    vision = mobilenet(
        v,
        of_images,
        c.take_count("image_token_id", 262145, least=0),
        c.take_count("vision_soft_tokens_per_image", 256),
    )
    return replace(text, vision=vision, audio=audio)


def mobilenet(v: HFConfig, projector: ProjectorSpec, image_id: int, tokens: int) -> VisionSpec:
    """Spec of MobileNetV5 (after MobileNetV4, arXiv:2404.10518), whose sizes the package timm fixes, from its
    config `v`.

    Args:
        projector: to the language model.
        image_id: of image tokens.
        tokens: of an image.

    Raises:
        ConfigError: another encoder, or sizes that the reference cannot run.
    """
    v.take_only(architecture=NAME, hidden_size=WIDTH, do_pooling=False)
    for key in ("label_names", "num_classes", "num_labels", "global_pool", "pretrained_cfg"):
        v.take(key, None)  # of a classifier
    given = v.take("model_args", None) or {}
    multiplier, side = given.get("channel_multiplier", 1.0), given.get("msfa_output_resolution", 16)
    known = isinstance(given, dict) and given.keys() <= {"channel_multiplier", "msfa_output_resolution"}
    if not known or type(side) is not int or side < 1 or not multiplier > 0:
        raise ConfigError(
            f"{v.name}: model_args may have channel_multiplier, a positive number, and "
            f"msfa_output_resolution, a count; found {abbreviate(given)}"
        )
    if tokens != side**2:
        raise ConfigError(
            f"{v.name}: an image has {tokens} tokens (vision_soft_tokens_per_image), and its features are "
            f"{side} times {side}"
        )
    return VisionSpec(
        *(WIDTH, PatchSpec(PATCH), (), projector, image_id),
        pictures=SquarePictures(PATCH * side),
        pyramid=PyramidSpec(
            64 if multiplier < 1 else _channels(64, multiplier), _stages(multiplier), math.sqrt(WIDTH)
        ),
    )


def _channels(count: int, multiplier: float) -> int:
    """A number of channels times the multiplier, as a multiple of 8 that is less by a tenth at most."""
    exact = count * multiplier
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _stages(multiplier: float) -> tuple[tuple[PyramidBlockSpec, ...], ...]:
    first, second, third, fourth = (_channels(n, multiplier) for n in (128, 256, 640, 1280))
    near, far = QueryBlockSpec(12, 64, stride=2), QueryBlockSpec(16, 96)
    return (
        (EdgeBlockSpec(first, 4, stride=2), *(EdgeBlockSpec(first, 4),) * 2),
        (
            InvertedBlockSpec(second, 6, start=3, middle=5, stride=2),
            *(InvertedBlockSpec(second, 4, start=size) for size in (5, 3, 5, 3)),
        ),
        (
            InvertedBlockSpec(third, 6, start=5, middle=5, stride=2),
            *(InvertedBlockSpec(third, 4, start=5),) * 7,
            InvertedBlockSpec(third, 1),
            *(near, InvertedBlockSpec(third, 2)) * 14,
        ),
        (
            InvertedBlockSpec(fourth, 6, start=5, middle=5, stride=2),
            *(far, InvertedBlockSpec(fourth, 2)) * 19,
        ),
    )


# -- tests

for_tests(
    "gemma3n",
    tiny={
        "text_config": {
            **find_architecture("gemma3n_text").tiny,
            "model_type": "gemma3n_text",
            "hidden_act": ...,
        },
        "vision_config": {
            "model_type": "gemma3n_vision",
            "architecture": NAME,
            "hidden_size": WIDTH,
            "vocab_size": 10,
            "vocab_offset": 111,
            "rms_norm_eps": 0.3,
            "model_args": {"channel_multiplier": 0.02, "msfa_output_resolution": 2},
            "label_names": ["LABEL_0", "LABEL_1"],
        },
        "audio_config": sounds.TINY,
        "image_token_id": 113,
        "vision_soft_tokens_per_image": 4,
        "audio_token_id": 123,
        "audio_soft_tokens_per_image": 6,
    },
    skip={"field:EmbedderSpec.padding_row": "of sounds, see tests/audio"},
)
