"""Qwen2-Audio (Chu et al., 2024, arXiv:2407.10759): Qwen2 with Whisper's encoder of sound; four columns of a
spectrogram, 40 ms, make a token.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import whisper
from liger_models.architectures.common.images import language_model
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import LinearProjectorSpec, ModelSpec


@register(
    "qwen2_audio",
    reference="Qwen2AudioForConditionalGeneration",
    audio=True,
    layouts=whisper.layouts(),
)
def qwen2_audio(c: HFConfig) -> ModelSpec:
    audio_id = c.take_count(("audio_token_index", "audio_token_id"), 151646, least=0)
    c.take_only(ignore_index=-100)
    encoder = whisper.audio(
        c.part("audio_config"),
        LinearProjectorSpec(bias=True),
        audio_id,
        mask="feature_attention_mask",
        paired=True,
    )
    return replace(language_model(c), audio=encoder)


# -- tests

for_tests(
    "qwen2_audio",
    tiny={
        "text_config": {"model_type": "qwen2", "head_dim": ...},
        "audio_config": {"model_type": "qwen2_audio_encoder", **whisper.TINY},
        "audio_token_index": 3,
    },
)
