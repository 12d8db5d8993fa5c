"""Sounds of Gemma 4 12B: pieces of waveforms, which pass through one linear layer and no encoder."""

from __future__ import annotations

from typing import Any

from liger_models.architectures.common.images import Names
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AudioSpec, LinearProjectorSpec, NormSpec, WaveformSounds

NAMES: Names = (("projector.linear.", "embed_audio.embedding_projection."),)
TINY: dict[str, Any] = {
    "model_type": "gemma4_unified_audio",
    "audio_embed_dim": 20,
    "rms_norm_eps": 0.3,
    "output_proj_dims": 20,
}


def waveforms(a: HFConfig, audio_id: int) -> AudioSpec:
    """Spec of the parts for sounds, from their config `a`.

    Args:
        audio_id: of audio tokens.
    """
    samples = a.take_count("audio_embed_dim", 640)
    a.take_only(hidden_size=samples, output_proj_dims=samples)
    norm = NormSpec(a.take_number("rms_norm_eps", 1e-6), cast="gemma", weighted=False)
    return AudioSpec(samples, samples, (), LinearProjectorSpec(norm=norm), audio_id, WaveformSounds())
