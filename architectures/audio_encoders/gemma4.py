"""Sounds of Gemma 4: spectrograms, which pass through a conformer; and of Gemma 4 12B: pieces of waveforms,
which pass through one linear layer and no encoder.
"""

from __future__ import annotations

import math
from typing import Any

from liger_models.architectures.common import activation
from liger_models.architectures.common.images import Names
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    LightConvSpec,
    LinearProjectorSpec,
    LocalAttentionSpec,
    MLPSpec,
    NormSpec,
    SubsampledSounds,
    WaveformSounds,
)

NAMES: Names = (("projector.linear.", "embed_audio.embedding_projection."),)
"""Names of what Gemma 4 12B has for sounds."""
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
    projector = LinearProjectorSpec(norm=_norm_of_features(a))
    return AudioSpec(samples, samples, (), projector, audio_id, WaveformSounds())


def _norm_of_features(a: HFConfig) -> NormSpec:
    return NormSpec(a.take_number("rms_norm_eps", 1e-6), cast="gemma", weighted=False)


CONFORMER: Names = (
    *((".qkv_proj.", "."), ("_proj.linear.", "_proj.")),  # of clipped ones
    ("_proj.", "_proj.linear."),
    *(("_proj.linear.input_", "_proj.input_"), ("_proj.linear.output_", "_proj.output_")),
    (".relative_k_proj.linear.", ".relative_k_proj."),
    (".self_attn.o_proj.", ".self_attn.post."),
    *((".conv.in_proj.", ".lconv1d.linear_start."), (".conv.out_proj.", ".lconv1d.linear_end.")),
    *((".conv.conv1d.", ".lconv1d.depthwise_conv1d."), (".conv.norm.", ".lconv1d.conv_norm.")),
    *((".first_mlp.", ".feed_forward1."), (".mlp.", ".feed_forward2.")),
    *((".up_proj.", ".ffw_layer_1."), (".down_proj.", ".ffw_layer_2.")),
    *(
        (f".{here}_layernorm.", f".{there}_layer_norm.")
        for here, there in (
            *(("first", "feed_forward1.pre"), ("post_first", "feed_forward1.post")),
            *(("pre_feedforward", "feed_forward2.pre"), ("post_feedforward", "feed_forward2.post")),
        )
    ),
    *((".input_layernorm.", ".norm_pre_attn."), (".post_attention_layernorm.", ".norm_post_attn.")),
    *((".conv_layernorm.", ".lconv1d.pre_layer_norm."), (".final_layernorm.", ".norm_out.")),
    (".subsampling.in_proj.linear.", ".subsampling.input_proj_linear."),
    (".subsampling.", ".subsample_conv_projection."),
    ("encoder.out_proj.linear.", "encoder.output_proj."),
    ("encoder.", "audio_tower."),
    *NAMES,
)
"""Names of the conformer and the projector."""
TINY_CONFORMER: dict[str, Any] = {
    "model_type": "gemma4_audio",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [12, 5],
    "conv_kernel_size": 3,
    "attention_chunk_size": 3,
    "attention_context_left": 4,
    "attention_logit_cap": 2.0,
    "rms_norm_eps": 0.3,
    "output_proj_dims": 20,
    "gradient_clipping": 4.0,
}


def conformer(a: HFConfig, audio_id: int) -> AudioSpec:
    """Spec of the encoder, from its config `a`.

    Args:
        audio_id: of audio tokens.

    Raises:
        ConfigError: sizes that the reference cannot run, or positions that are not distances.
    """
    width, clipped = a.take_count("hidden_size", 1024), a.take_flag("use_clipped_linears", True)
    channels = _channels(a)
    bound = a.take_number("gradient_clipping", 1e10, positive=True)
    a.fill({"hidden_act": "silu"})
    act, norm = activation(a, "hidden_act", gated=False), NormSpec(cast="gemma")
    of_convolution = NormSpec(a.take_number("rms_norm_eps", 1e-6), cast="gemma")
    taps = a.take_count("conv_kernel_size", 5, least=2)
    block = BlockSpec(
        _attention(a, width, clipped),
        MLPSpec(4 * width, act, gated=False, clipped=clipped),
        norm,
        "conformer_sandwich",
        residual_scale=a.take_number("residual_weight", 0.5),
        second_mixer=LightConvSpec(taps, of_convolution, act, bound, clipped),
        bound=bound,
    )
    return AudioSpec(
        *(width, 4 * (channels[0] // 4), (block,) * a.take_count("num_hidden_layers", 12)),
        *(LinearProjectorSpec(norm=_norm_of_features(a)), audio_id),
        SubsampledSounds(channels, of_convolution.eps),
        output_size=a.take_count("output_proj_dims", 1536),
    )


def _channels(a: HFConfig) -> tuple[int, ...]:
    """Channels of the two convolutions. In the reference a quarter of the first ones are also the frequencies
    that are left.
    """
    found = a.take("subsampling_conv_channels", [128, 32])
    counts = isinstance(found, list) and all(type(n) is int and n > 0 for n in found)
    if not counts or len(found) != 2 or found[0] < 4:
        raise ConfigError(
            f"{a.name}: subsampling_conv_channels must be two counts, the first at least 4, found "
            f"{abbreviate(found)}"
        )
    return tuple(found)


def _attention(a: HFConfig, width: int, clipped: bool) -> LocalAttentionSpec:
    heads = a.take_count("num_attention_heads", 8)
    if width % heads:
        raise ConfigError(f"{a.name}: {heads} heads of {width} dimensions together; expected a multiple")
    chunk = a.take_count("attention_chunk_size", 12)
    left = a.take_count("attention_context_left", 13, least=2)
    a.take_only(attention_context_right=0)
    if chunk not in (left - 1, left):
        raise ConfigError(
            f"{a.name}: attention_chunk_size is {chunk} and attention_context_left {left}; expected a size "
            f"of {left - 1} or {left}, with which the reference's positions are distances"
        )
    cap = a.take_number("attention_logit_cap", 50.0, positive=True)
    hidden, most = a.take("attention_invalid_logits_value", -1e9), -cap - 200
    if type(hidden) not in (int, float) or not hidden <= most:
        raise ConfigError(
            f"{a.name}: attention_invalid_logits_value must be a number of at most {most:g}, which gives "
            f"hidden frames no weight, found {abbreviate(hidden)}"
        )
    head_dim = width // heads
    return LocalAttentionSpec(
        *(heads, head_dim, head_dim**-0.5 / math.log(2), math.log(1 + math.e) / math.log(2)),
        window=left - 1,
        softcap=cap,
        clipped=clipped,
    )
