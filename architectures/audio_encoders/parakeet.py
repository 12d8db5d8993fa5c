"""The encoder of Parakeet (NVIDIA; FastConformer, Rekesh et al., 2023, arXiv:2305.05084): a conformer with
relative positions and batch norms, whose frames are 80 ms of sound.
"""

from __future__ import annotations

import math
from typing import Any

from liger_models.architectures.audio_encoders.parts import halvings, subsampling_names
from liger_models.architectures.common import activation
from liger_models.architectures.common.images import Names
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    DepthwiseSounds,
    LayerNormSpec,
    LightConvSpec,
    MLPProjectorSpec,
    MLPSpec,
    NormSpec,
    ProjectorSpec,
    RelativeAttentionSpec,
)

NAMES: Names = (
    *((".first_mlp.", ".feed_forward1."), (".mlp.", ".feed_forward2.")),
    *((".up_proj.", ".linear1."), (".down_proj.", ".linear2.")),
    *((".first_layernorm.", ".norm_feed_forward1."), (".input_layernorm.", ".norm_self_att.")),
    *((".conv_layernorm.", ".norm_conv."), (".pre_feedforward_layernorm.", ".norm_feed_forward2.")),
    *((".final_layernorm.", ".norm_out."), (".conv.in_proj.", ".conv.pointwise_conv1.")),
    (".conv.batch_norm.", ".conv.norm."),
    *((".conv.conv1d.", ".conv.depthwise_conv."), (".conv.out_proj.", ".conv.pointwise_conv2.")),
    (".subsampling.in_proj.", ".subsampling.linear."),
    *subsampling_names(".subsampling.layers."),
)
"""Names of the encoder, after `audio_tower.`."""
ON_DISK = (
    ("audio.encoder.", Layout(NAMES, root="sound_encoder.encoder.")),
    ("audio.projector.", Layout((("linear_", "linear"),), root="sound_projection.")),
)
"""Layouts of the encoder and its projector in checkpoints."""
IN_MODULES = (
    ("audio.encoder.", Layout(NAMES, root="audio_tower.")),
    ("audio.projector.", Layout((("norm.", "layer_norm."),), root="embed_audio.")),
)
"""The same in transformers' modules."""
_KEYS = ("audio_config", "sound_config")
_OF_PROCESSOR = "sampling_rate max_position_embeddings num_key_value_heads"
_DROPOUTS = ("dropout", "layerdrop", "activation_dropout", "attention_dropout")


def unread(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the tensors that are not read: of processors, or all where the config `c` has no sounds."""
    if _key_of(c):
        return ("audio_tower.feature_extractor.*", "sound_encoder.encoder.feature_extractor.*")
    return ("audio_tower.*", "embed_audio.*", "sound_encoder.*", "sound_projection.*")


def _key_of(c: HFConfig) -> str | None:
    return next((key for key in _KEYS if c.raw.get(key) is not None), None)


def projected(c: HFConfig) -> AudioSpec | None:
    """Spec of the encoder and its projector, from the whole model's config; None if it has no sounds."""
    key = _key_of(c)
    for other in {*_KEYS} - {key}:
        c.take(other, None)
    audio_id = c.take_count(("audio_token_id", "sound_context_token_id"), *([] if key else [None]), least=0)
    if key is None:
        return None
    a = c.part(key)
    size, bias = a.take_count("projection_hidden_size"), a.take_flag("projection_bias", False)
    projector = MLPProjectorSpec("relu2", bias, norm=NormSpec(1e-5, cast="float32"), size=size)
    return audio(a, projector, audio_id, bias=False, scaled=False)


def audio(a: HFConfig, projector: ProjectorSpec, audio_id: int, *, bias: bool, scaled: bool) -> AudioSpec:
    """Spec of the encoder, from its config.

    Args:
        projector: into the language model.
        audio_id: of audio tokens.
        bias, scaled: the defaults of `attention_bias` and `scale_input`.

    Raises:
        ConfigError: sizes that the reference cannot run.
    """
    for key in _OF_PROCESSOR.split():
        a.take(key, None)
    a.fill({"hidden_act": "silu", **dict.fromkeys(_DROPOUTS, 0.1)})
    a.take_only(subsampling_conv_kernel_size=3, subsampling_conv_stride=2, dropout_positions=0.0)
    width, heads = a.take_count("hidden_size", 1024), a.take_count("num_attention_heads", 8)
    if width % (2 * heads):
        raise ConfigError(
            f"{a.name}: {heads} heads of {width} dimensions together; expected an even multiple"
        )
    a.take_only(head_dim=width // heads)
    count, bins = halvings(a, "subsampling_factor"), a.take_count("num_mel_bins", 80)
    if bins % 2**count:
        raise ConfigError(
            f"{a.name}: num_mel_bins is {bins}; expected a multiple of the subsampling_factor, {2**count}"
        )
    taps = a.take_count("conv_kernel_size", 9)
    if taps % 2 == 0:
        raise ConfigError(f"{a.name}: conv_kernel_size is {taps}; expected an odd number")
    biased, act = a.take_flag("attention_bias", bias), activation(a, "hidden_act", gated=False)
    norm = LayerNormSpec(1e-5)
    block = BlockSpec(
        RelativeAttentionSpec(heads, width // heads, (width // heads) ** -0.5, biased),
        MLPSpec(a.take_count("intermediate_size", 4096), act, bias=biased, gated=False),
        norm,
        "conformer",
        residual_scale=0.5,
        second_mixer=LightConvSpec(taps, norm, act, centred=True, bias=a.take_flag("convolution_bias", True)),
    )
    channels = (a.take_count("subsampling_conv_channels", 256),) * count
    scale = math.sqrt(width) if a.take_flag("scale_input", scaled) else 1.0
    blocks = (block,) * a.take_count("num_hidden_layers", 24)
    return AudioSpec(width, bins, blocks, projector, audio_id, DepthwiseSounds(channels, scale))


TINY: dict[str, Any] = {
    "model_type": "parakeet_encoder",
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
    "conv_kernel_size": 5,
    "subsampling_conv_channels": 5,
    "subsampling_factor": 4,
    **dict.fromkeys(_DROPOUTS, 0.0),
}
