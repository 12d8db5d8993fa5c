"""Voxtral (Mistral AI, 2025, arXiv:2507.13264): LLaMA with Whisper's encoder of sound, in pieces of thirty
seconds; eight columns of a spectrogram, 80 ms, make a token.
"""

import math
from dataclasses import replace

from liger_models.architectures.audio_encoders import whisper
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders.parts import projector_activation
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import MLPProjectorSpec, ModelSpec


def merged(a: HFConfig) -> int:
    """Square root of the number of frames whose features are concatenated, from the encoder's config: as many
    as make the width of its MLPs.

    Raises:
        ConfigError: the number is not a square, or does not divide the frames of a piece.
    """
    width, inner = whisper.sizes(a)
    frames = a.take_count("max_source_positions", 1500)
    side = math.isqrt(inner // width)
    if inner != width * side**2 or frames % side**2:
        raise ConfigError(
            f"{a.name}: intermediate_size is {inner}, hidden_size {width} and max_source_positions {frames}; "
            "expected the first to be the second times 1, 4, 9 or another square that divides the third, "
            "since the features of so many frames make a token"
        )
    return side


@register(
    "voxtral",
    reference="VoxtralForConditionalGeneration",
    audio=True,
    layouts=whisper.layouts(),
)
def voxtral(c: HFConfig) -> ModelSpec:
    a = c.part("audio_config")
    projector = MLPProjectorSpec(projector_activation(c), bias=False, merge=merged(a))
    return replace(
        language_model(c), audio=whisper.audio(a, projector, c.take_count("audio_token_id", least=0))
    )


# -- tests

for_tests(
    "voxtral",
    tiny={
        "text_config": {"model_type": "llama"},
        "audio_config": {
            "model_type": "voxtral_encoder",
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_mel_bins": 7,
            "max_source_positions": 12,
        },
        "audio_token_id": 3,
    },
)
