"""Qwen3-ASR (Qwen team, 2026): Qwen3 with the encoder of sound of Qwen3-Omni, for transcription; 80 ms make a
token.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import qwen_omni, whisper
from liger_models.architectures.common.images import language_model
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

HEARS = (
    ("norm_after.", "ln_post."),
    *((f"conv{i}.", f"conv2d{i}.") for i in (1, 2, 3)),
    *whisper.LAYER_NAMES,
)


@register(
    "qwen3_asr",
    reference="Qwen3ASRForConditionalGeneration",
    audio=True,
    layouts=(
        Layout(
            root="model.language_model.",
            parts=(
                ("audio.encoder.", Layout(HEARS, root="model.audio_tower.")),
                ("audio.projector.", Layout(root="model.multi_modal_projector.")),
            ),
        ),
    ),
    unread=dict.fromkeys(("timestamp_token_id", "token_classification_bias"), "of a model that aligns words"),
)
def qwen3_asr(c: HFConfig) -> ModelSpec:
    text, audio_id = language_model(c), c.take_count("audio_token_id", 151676, least=0)
    audio = qwen_omni.convolved_audio(c.part("audio_config"), audio_id, text.hidden_size, filled=True)
    return replace(text, audio=audio)


# -- tests

for_tests(
    "qwen3_asr",
    tiny={
        "text_config": {"model_type": "qwen3"},
        "audio_config": {
            "model_type": "qwen3_asr_encoder",
            "d_model": 32,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            "encoder_layers": 2,
            "num_mel_bins": 7,
            "n_window": 50,
            "n_window_infer": 200,
            "downsample_hidden_size": 6,
            "output_dim": 48,
        },
        "audio_token_id": 3,
    },
)
