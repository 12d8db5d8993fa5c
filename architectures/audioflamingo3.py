"""Audio Flamingo 3 (NVIDIA, 2025, arXiv:2507.08128): Qwen2 with Whisper's encoder of sound, in pieces of
thirty seconds; four columns of a spectrogram, 40 ms, make a token.
"""

import copy
from dataclasses import replace
from typing import Any

from liger_models.architectures.audio_encoders import whisper
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders.parts import projector_activation
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import MLPProjectorSpec, ModelSpec


@register(
    "audioflamingo3",
    reference="AudioFlamingo3ForConditionalGeneration",
    audio=True,
    layouts=whisper.layouts(),
)
def audioflamingo3(c: HFConfig) -> ModelSpec:
    projector = MLPProjectorSpec(projector_activation(c), c.take_flag("projector_bias", True))
    audio_id = c.take_count("audio_token_id", 151669, least=0)
    encoder = whisper.audio(
        c.part("audio_config"), projector, audio_id, mask="input_features_mask", paired=True
    )
    return replace(language_model(c), audio=encoder)


# -- tests

TINY: dict[str, Any] = {
    "text_config": {"model_type": "qwen2", "head_dim": ...},
    "audio_config": {
        "model_type": "audioflamingo3_encoder",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_mel_bins": 7,
        "max_source_positions": 12,
    },
    "audio_token_id": 3,
}
for_tests(
    "audioflamingo3",
    tiny=copy.deepcopy(TINY),
    variants={"no biases": {"projector_bias": False}},
)
