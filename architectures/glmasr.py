"""GLM-ASR (Z.ai, 2025): LLaMA with an encoder of sound like Whisper's, but with rotary positions, for
transcription; eight columns of a spectrogram, 80 ms, make a token.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.audio_encoders import whisper
from liger_models.architectures.common import activation, rope
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders.parts import LINEAR_NAMES, projector_activation, whole_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    LayerNormSpec,
    MLPProjectorSpec,
    MLPSpec,
    ModelSpec,
    PaddedSounds,
)

MERGED = 4  # frames whose features are concatenated, fixed in the reference


@register(
    "glmasr",
    reference="GlmAsrForConditionalGeneration",
    audio=True,
    layouts=whisper.layouts(encoder=(("norm_after.", "norm."), *LINEAR_NAMES)),
)
def glmasr(c: HFConfig) -> ModelSpec:
    text, a = language_model(c), c.part("audio_config")
    a.fill({"max_position_embeddings": 1500, "hidden_act": "gelu"})
    width, inner = a.take_count("hidden_size", 1280), a.take_count("intermediate_size", 5120)
    frames, heads = a.take_count("max_position_embeddings"), a.take_count("num_attention_heads", 20)
    if inner != MERGED * width or frames % MERGED:
        raise ConfigError(
            f"{a.name}: intermediate_size is {inner}, hidden_size {width} and max_position_embeddings "
            f"{frames}; expected the first to be {MERGED} times the second, and the last a multiple of "
            f"{MERGED}, since the features of so many frames make a token"
        )
    attn = whole_attention(a, width, heads, k_bias=False, rope=rope(a, width // heads, partial=0.5))
    attn = replace(attn, num_key_value_heads=a.take_count("num_key_value_heads", heads))
    mlp = MLPSpec(inner, activation(a, gated=False), bias=True, gated=False)
    norm = LayerNormSpec(1e-5)
    projector = MLPProjectorSpec(projector_activation(c), merge=2, size=2 * text.hidden_size)
    audio = AudioSpec(
        *(width, a.take_count("num_mel_bins", 128)),
        (BlockSpec(attn, mlp, norm),) * a.take_count("num_hidden_layers", 32),
        projector,
        c.take_count("audio_token_id", 59260, least=0),
        PaddedSounds(frames, True, "input_features_mask", attended=True),
        norm,
    )
    return replace(text, audio=audio)


# -- tests

TINY_AUDIO: dict[str, Any] = {
    "model_type": "glmasr_encoder",
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 7,
    "max_position_embeddings": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
for_tests(
    "glmasr",
    tiny={"text_config": {"model_type": "llama"}, "audio_config": TINY_AUDIO, "audio_token_id": 3},
    variants={"shared keys": {"audio_config": {**TINY_AUDIO, "num_key_value_heads": 1}}},
)
