"""The audio encoder of Phi-4-multimodal (arXiv:2503.01743, section 2.1.2): a conformer with biases by
distance, whose frames are 80 ms of sound.
"""

from __future__ import annotations

from typing import Any

from liger_models.architectures.audio_encoders.parts import halvings, subsampling_names
from liger_models.architectures.common import activation
from liger_models.architectures.common.images import Names
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    CountedSounds,
    DistanceAttentionSpec,
    LayerNormSpec,
    LightConvSpec,
    MLPSpec,
    TwoWaysSpec,
)

PIECE = 500  # frames that attend to one another, fixed in the reference

NAMES: Names = (
    *((".first_mlp.", ".feed_forward_in."), (".mlp.", ".feed_forward_out.")),
    *((".first_layernorm.", ".feed_forward_in.layer_norm."), (".input_layernorm.", ".layer_norm_att.")),
    (".pre_feedforward_layernorm.", ".feed_forward_out.layer_norm."),
    *((".conv_layernorm.", ".conv.layer_norm."), (".final_layernorm.", ".layer_norm.")),
    *((".conv.in_proj.", ".conv.glu.ext_pw_conv_1d."), (".conv.out_proj.", ".conv.ext_pw_conv_1d.")),
    *((".conv.conv1d.", ".conv.dw_sep_conv_1d.dw_conv."), (".conv.gate.", ".conv.glu.")),
    (".conv.pointwise.", ".conv.dw_sep_conv_1d.pw_conv."),
    ("encoder.subsampling.moments.mean", "encoder.encoder_embedding.global_mean"),
    ("encoder.subsampling.moments.scale", "encoder.encoder_embedding.global_invstd"),
    *(("encoder.subsampling.in_proj.", "encoder.embed.out."), *subsampling_names(".embed.conv.")),
    ("encoder.distances.", "encoder.relative_attention_bias_layer.bias_values."),
    ("encoder.layers.", "encoder.encoders."),
    *(
        (f"projector.{here}.linear_{k}.", f"{way}_proj_for_{there}.")
        for here, there in (("alone", "speech"), ("with_images", "vision_speech"))
        for k, way in ((1, "up"), (2, "down"))
    ),
)
"""Names of the encoder and the projector, after `audio_embed.`."""
_SAME_WIDTH = ("ext_pw_out_channel", "depthwise_separable_out_channel")


def audio(a: HFConfig, image_id: int) -> AudioSpec:
    """Spec of the encoder, from its config.

    Args:
        image_id: of image tokens, next to which sounds have a projection of their own.

    Raises:
        ConfigError: sizes that the reference cannot run, or masks that depend on chance in training.
    """
    for key in ("left_chunk", "nemo_final_size", "depthwise_seperable_out_channel", "feature_layer"):
        a.take(key, None)  # of chunks, or not read by the reference
    width, heads = a.take_count("hidden_size", 1024), a.take_count("num_attention_heads", 16)
    if width % heads:
        raise ConfigError(f"{a.name}: {heads} heads of {width} dimensions together; expected a multiple")
    a.take_only(
        chunk_size=-1, bias_symmetric=False, depthwise_multiplier=1, downsample_rate=1, dropout_rate=0.0
    )
    for key in _SAME_WIDTH:
        if (found := a.take_count(key, 1024)) != width:
            raise ConfigError(f"{a.name}: {key} is {found}; expected {width}, the hidden_size")
    a.fill({"nemo_activation": "relu"})
    norm = LayerNormSpec(1e-5)
    convolution = LightConvSpec(
        a.take_count("kernel_size", 3),
        norm,
        activation(a, "conv_activation", gated=False),
        separable=True,
        gate=activation(a, "conv_glu_type"),
    )
    block = BlockSpec(
        DistanceAttentionSpec(heads, width // heads, (width // heads) ** -0.5),
        MLPSpec(a.take_count("intermediate_size", 1536), activation(a, "activation"), bias=True),
        norm,
        "conformer",
        residual_scale=0.5,
        second_mixer=convolution,
    )
    channels = (a.take_count("nemo_conv_channels", 1024),) * halvings(a, "time_reduction")
    return AudioSpec(
        width,
        a.take_count("input_size", 80),
        (block,) * a.take_count("num_blocks", 24),
        TwoWaysSpec(),
        a.take_count("audio_token_id", 200011, least=0),
        CountedSounds(channels, PIECE, activation(a, "nemo_activation", gated=False)),
        distances=a.take_count("bias_max_distance", 1000),
        image_id=image_id,
    )


TINY: dict[str, Any] = {
    "model_type": "phi4_multimodal_audio",
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_blocks": 2,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 24,
    "depthwise_separable_out_channel": 24,
    "input_size": 7,
    "time_reduction": 4,
    "bias_max_distance": 3,
    "nemo_conv_channels": 5,
    "audio_token_id": 7,
}
