"""Music Flamingo (NVIDIA, 2025, arXiv:2511.10289): Audio Flamingo 3 for music of up to twenty minutes;
features of sound are rotated by the time since the beginning of their recording.
"""

import copy
from dataclasses import replace

from liger_models.architectures.audio_encoders import whisper
from liger_models.architectures.audioflamingo3 import TINY, audioflamingo3
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec, PaddedSounds, TimeRotarySpec


@register(
    "musicflamingo",
    reference="MusicFlamingoForConditionalGeneration",
    audio=True,
    layouts=whisper.layouts(),
    unread={
        **dict.fromkeys(("audio_bos_token_id", "audio_eos_token_id"), "of processors"),
        **dict.fromkeys(("head_dim", "max_position_embeddings"), "replaced by the reference"),
    },
)
def musicflamingo(c: HFConfig) -> ModelSpec:
    model = audioflamingo3(c)
    assert model.audio is not None
    assert isinstance(model.audio.sounds, PaddedSounds)
    rotary = c.take_rope(default_theta=1200.0, head_dim_default_partial=0.2)
    theta, share = rotary.pop("rope_theta"), rotary.pop("partial_rotary_factor")
    dim, tokens = int(model.audio.hidden_size * share), model.audio.sounds.frames // 2
    if rotary != {"rope_type": "default"} or tokens > int(theta):
        raise ConfigError(
            f"{c.name}: rope_parameters must be of the type default, with a rope_theta of at least the "
            f"{tokens} tokens of a clip; found {theta} and {rotary}"
        )
    if dim < 2 or dim % 2 or 2 * dim > model.audio.hidden_size:
        raise ConfigError(
            f"{c.name}: partial_rotary_factor is {share}; expected an even number of at most half of the "
            f"encoder's {model.audio.hidden_size} dimensions, found {dim}"
        )
    times = TimeRotarySpec(dim, theta, c.take_number("audio_frame_step", 0.01, positive=True))
    return replace(model, audio=replace(model.audio, times=times))


# -- tests

for_tests(
    "musicflamingo",
    tiny={
        **copy.deepcopy(TINY),
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
        "audio_frame_step": 0.3,
    },
)
