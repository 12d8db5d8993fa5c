"""Sounds of Gemma 3n: spectrograms, which pass through a conformer (USM, arXiv:2303.01037) like Gemma 4's. A
feature is 160 ms, and a clip has a fixed number of tokens.
"""

from __future__ import annotations

import math
from typing import Any

from liger_models.architectures.common.images import Names
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AudioSpec,
    BlockSpec,
    EmbedderSpec,
    LightConvSpec,
    LocalAttentionSpec,
    MLPSpec,
    NormSpec,
    SubsampledSounds,
)

EMBEDDER: Names = (
    *(
        ("table.", "embedding."),
        ("norm_of_ids.", "hard_embedding_norm."),
        ("norm_of_features.", "soft_embedding_norm."),
    ),
    ("linear.", "embedding_projection."),
)
"""Names in a projector."""
NAMES: Names = (
    *((".mixer.", "."), (".qkv_proj.", "."), (".relative_k_proj.", ".relative_position_embedding.pos_proj.")),
    *((".self_attn.o_proj.", ".attention.post."), (".self_attn.", ".attention.attn.")),
    *((".conv.in_proj.", ".lconv1d.linear_start."), (".conv.out_proj.", ".lconv1d.linear_end.")),
    *((".conv.conv1d.", ".lconv1d.depthwise_conv1d."), (".conv.norm.", ".lconv1d.conv_norm.")),
    *((".first_mlp.", ".ffw_layer_start."), (".mlp.", ".ffw_layer_end.")),
    *((".up_proj.", ".ffw_layer_1."), (".down_proj.", ".ffw_layer_2.")),
    *(
        (f".{here}_layernorm.", f".{there}_layer_norm.")
        for here, there in (
            *(("first", "ffw_layer_start.pre"), ("post_first", "ffw_layer_start.post")),
            *(("pre_feedforward", "ffw_layer_end.pre"), ("post_feedforward", "ffw_layer_end.post")),
        )
    ),
    *(
        (".input_layernorm.", ".attention.pre_attn_norm."),
        (".post_attention_layernorm.", ".attention.post_norm."),
    ),
    *((".conv_layernorm.", ".lconv1d.pre_layer_norm."), (".final_layernorm.", ".norm.")),
    ("subsampling.in_proj.", "subsampling.input_proj_linear."),
    ("subsampling.layer", "subsampling.conv_"),
    *(("subsampling.", "subsample_conv_projection."), ("layers.", "conformer.")),
)
"""Names in the encoder."""
TINY: dict[str, Any] = {
    "model_type": "gemma3n_audio",
    "vocab_size": 10,
    "vocab_offset": 121,
    "input_feat_size": 10,
    "hidden_size": 24,
    "rms_norm_eps": 0.3,
    "gradient_clipping": 4.0,
    "conf_attention_chunk_size": 3,
    "conf_attention_context_left": 4,
    "conf_attention_logit_cap": 2.0,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 2,
    "conf_conv_kernel_size": 3,
    "conf_reduction_factor": 4,
    "conf_residual_weight": 0.4,
    "sscp_conv_channel_size": [6, 5],
    "sscp_conv_group_norm_eps": 0.02,
}


def conformer(a: HFConfig, audio_id: int, *, tokens: int, vocab_size: int) -> AudioSpec:
    """Spec of the encoder, from its config `a`.

    Args:
        audio_id: of audio tokens.
        tokens: of each clip.
        vocab_size: of the language model, whose last id fills up features.

    Raises:
        ConfigError: sizes that the reference cannot run, or attention to later frames.
    """
    width, channels = a.take_count("hidden_size", 1536), _channels(a)
    bound = a.take_number("gradient_clipping", 1e10, positive=True)
    norm = NormSpec(cast="gemma")
    of_convolution = NormSpec(a.take_number("rms_norm_eps", 1e-6), cast="gemma")
    taps = a.take_count("conf_conv_kernel_size", 5, least=2)
    block = BlockSpec(
        _attention(a, width),
        MLPSpec(4 * width, "silu", gated=False),
        norm,
        "conformer_sandwich",
        residual_scale=a.take_number("conf_residual_weight", 0.5),
        second_mixer=LightConvSpec(taps, of_convolution, "silu", bound),
        bound=bound,
    )
    projector = embedder(a, 262272, vocab_size)
    return AudioSpec(
        width,
        a.take_count("input_feat_size", 128),
        (block,) * a.take_count("conf_num_hidden_layers", 12),
        projector,
        audio_id,
        SubsampledSounds(channels, a.take_number("sscp_conv_group_norm_eps", 1e-3), cumulative=True),
        reduction=a.take_count("conf_reduction_factor", 4),
        tokens=tokens,
    )


def embedder(part: HFConfig, first_id: int, vocab_size: int | None = None) -> EmbedderSpec:
    """Spec of a projector, from the config of its encoder.

    Args:
        first_id: default of the first id of its vocabulary.
        vocab_size: of the language model, if its last id, which fills up features, is in this vocabulary.

    Raises:
        ConfigError: that id is not.
    """
    ids, first = part.take_count("vocab_size", 128), part.take_count("vocab_offset", first_id, least=0)
    row = None if vocab_size is None else vocab_size - 1 - first
    if row is not None and not 0 <= row < ids:
        raise ConfigError(
            f"{part.name}: vocab_offset is {first} and vocab_size {ids}; expected that they include the last "
            f"id of the language model, {row + first}, which fills up the features of sounds"
        )
    return EmbedderSpec(first, ids, part.take_number("rms_norm_eps", 1e-6), row)


def _channels(a: HFConfig) -> tuple[int, ...]:
    """Channels of the two convolutions."""
    found = a.take("sscp_conv_channel_size", [128, 32])
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise ConfigError(f"{a.name}: sscp_conv_channel_size must be two counts, found {abbreviate(found)}")
    a.take_only(sscp_conv_kernel_size=[[3, 3], [3, 3]], sscp_conv_stride_size=[[2, 2], [2, 2]])
    return tuple(found)


def _attention(a: HFConfig, width: int) -> LocalAttentionSpec:
    heads = a.take_count("conf_num_attention_heads", 8)
    if width % heads or width % 2:
        raise ConfigError(f"{a.name}: {heads} heads of {width} dimensions together; expected a multiple")
    a.take("conf_attention_chunk_size", None)  # frames that the reference computes together
    for key in ("conf_positional_bias_size", "sscp_conv_eps"):
        a.take(key, None)  # in older files, and not read by the reference
    a.take_only(conf_attention_context_right=0)
    head_dim = width // heads
    return LocalAttentionSpec(
        *(heads, head_dim, head_dim**-0.5 / math.log(2), 1.0),
        window=a.take_count("conf_attention_context_left", 13),
        softcap=a.take_number("conf_attention_logit_cap", 50.0, positive=True),
    )
