"""The audio encoders of Qwen2.5-Omni (arXiv:2503.20215, section 2.2) and Qwen3-Omni, which cut clips into
chunks; and the models around them, which also see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.audio_encoders import whisper
from liger_models.architectures.common import activation
from liger_models.architectures.common.images import Names
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AudioSpec,
    ChunkedSounds,
    ClockSpec,
    LayerNormSpec,
    LinearProjectorSpec,
    MLPProjectorSpec,
    ModelSpec,
    VisionSpec,
)

_SPEAKS = """
    talker_config token2wav_config code2wav_config enable_audio_output enable_talker im_start_token_id
    im_end_token_id tts_pad_token_id tts_bos_token_id tts_eos_token_id system_token_id assistant_token_id
"""
UNREAD = {
    **dict.fromkeys(("audio_end_token_id", "seconds_per_chunk"), "of processors, which place the tokens"),
    "user_token_id": "of no effect in the thinker",
    **dict.fromkeys(_SPEAKS.split(), "of the part that speaks"),
}
"""Keys of thinkers and of whole models."""
OTHER_PARTS = ("talker.*", "token2wav.*", "code2wav.*")
"""Tensors of whole models that the thinker does not read."""
TINY_IDS = {
    "audio_start_token_id": 5,
    "vision_start_token_id": 6,
    "position_id_per_seconds": 3,
    "tie_word_embeddings": False,
}
SKIP = {
    "field:ClockSpec.whole": "whole numbers are the same rounded down",
    **dict.fromkeys(
        ("field:VisionSpec.audio_id", "field:ClockSpec.start_ids", "field:ClockSpec.shared_frame"),
        "of sounds of videos, see tests/audio/test_sounds_of_videos.py",
    ),
}
_WHOLE = "thinker_config"


def thinker(c: HFConfig) -> HFConfig:
    """The config of the thinker, the part that hears, sees and writes, in that of a whole model."""
    if _WHOLE not in c.raw:
        return c
    part = c.part(_WHOLE)
    for key in UNREAD:
        part.take(key, None)
    return part


def layouts(audio: Names, vision: Names, *texts: Layout) -> tuple[Layout, ...]:
    """Layouts of a thinker alone, of one in transformers' modules, and of whole models.

    Args:
        audio, vision: names of the encoders.
        texts: of the language model.
    """
    return tuple(
        replace(
            text,
            rename=(*text.rename, *head),
            root=root,
            parts=(
                ("audio.", Layout(audio, root=f"{inner}audio_tower.")),
                ("vision.", Layout(vision, root=f"{inner}visual.")),
            ),
        )
        for root, inner, head in (
            ("model.", "", ()),
            ("model.language_model.", "model.", ()),
            ("thinker.model.", "thinker.", (("lm_head.", "thinker.lm_head."),)),
        )
        for text in texts
    )


def averaged_audio(a: HFConfig, audio_id: int, text_size: int) -> AudioSpec:
    """The encoder of Qwen2.5-Omni, from its config `a`: Whisper's, chunk by chunk.

    Args:
        audio_id: of audio tokens.
        text_size: width of the language model.
    """
    a.take_only(output_dim=text_size)
    sounds = ChunkedSounds(2 * a.take_count("n_window", 100))
    _check_positions(a, sounds.chunk // 2)
    blocks, norm = whisper.blocks(a), LayerNormSpec(1e-5)
    bins, width = a.take_count("num_mel_bins", 128), whisper.sizes(a)[0]
    return AudioSpec(width, bins, blocks, LinearProjectorSpec(bias=True), audio_id, sounds, norm, paired=True)


def convolved_audio(a: HFConfig, audio_id: int, text_size: int, *, filled: bool = False) -> AudioSpec:
    """The encoder of Qwen3-Omni, from its config `a`: convolutions over columns and frequencies, whose frames
    attend to those of several chunks. If `filled`, chunks are convolved with the processor's padding, as in
    Qwen3-ASR.

    Raises:
        ConfigError: chunks that do not make 13 frames, or windows that are not whole chunks.
    """
    a.take_only(output_dim=text_size)
    half = a.take_count("n_window", 50)
    window = a.take_count("n_window_infer", 800)
    if not 97 <= 2 * half <= 104 or window < 2 * half:
        raise ConfigError(
            f"{a.name}: n_window is {half} and n_window_infer {window}; expected 49 to 52, since the "
            "reference counts 13 tokens for a chunk of 2 * n_window columns, and at least one chunk"
        )
    _check_positions(a, 13, *(("max_position_embeddings", 13) if filled else ()))
    a.take("conv_chunksize", None)  # chunks convolved at once
    a.fill({"activation_function": "gelu"})
    width, bins = whisper.sizes(a)[0], a.take_count("num_mel_bins", 128)
    projector = MLPProjectorSpec(activation(a, "activation_function", gated=False), size=width)
    return AudioSpec(
        *(width, bins, whisper.blocks(a, k_bias=True), projector, audio_id),
        ChunkedSounds(2 * half, window // (2 * half), *((True, "input_features_mask") if filled else ())),
        LayerNormSpec(1e-5),
        channels=a.take_count("downsample_hidden_size", 480),
    )


def _check_positions(
    a: HFConfig, frames: int, key: str = "max_source_positions", default: int = 1500
) -> None:
    most = a.take_count(key, default)
    if frames > most:
        raise ConfigError(f"{a.name}: chunks have {frames} frames, and there are {most} positions ({key})")


def with_encoders(
    c: HFConfig, text: ModelSpec, vision: VisionSpec, audio: AudioSpec, *, sound_start: int, newer: bool
) -> ModelSpec:
    """The language model with both encoders, whose config is `c`.

    Args:
        sound_start: default of the token before a sound.
        newer: positions are those of Qwen3-Omni.
    """
    rate = c.take_number("position_id_per_seconds", 25)
    starts = (
        c.take_count("vision_start_token_id", 151652, least=0),
        c.take_count("audio_start_token_id", sound_start, least=0),
    )
    positions = ClockSpec(rate, start_ids=starts, shared_frame=not newer, whole=newer)
    vision = replace(vision, positions=positions, kinds=None, audio_id=audio.audio_id)
    return replace(text, vision=vision, audio=audio)


TINY_AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "encoder_layers": 2,
    "num_mel_bins": 7,
    "max_source_positions": 16,
}
