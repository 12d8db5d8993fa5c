"""Shared parts of Liquid's families: gated short convolutions in place of attention, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.grouped_attention import attention
from liger_models.architectures.common.model import FULL, layer_types
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, GatedConvSpec, ModelSpec, NormSpec, QKNormSpec

CONV = "conv"
"""Type of layers with a convolution."""

NAMES = (
    (".conv.conv1d.", ".conv.conv."),
    (".mlp.", ".feed_forward."),
    (".feed_forward.router.correction_bias", ".feed_forward.expert_bias"),
    (".router.", ".gate."),
    ("model.norm.", "model.embedding_norm."),
)
EXPERTS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
PRE_NORM = ((".input_layernorm.", ".operator_norm."), (".post_attention_layernorm.", ".ffn_norm."))
ATTENTION = (
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".q_norm.", ".q_layernorm."),
    (".k_norm.", ".k_layernorm."),
)


def gated_conv(c: HFConfig, width: int) -> GatedConvSpec:
    """A gated short convolution; `width` is the default of `conv_L_cache`.

    Raises:
        ConfigError: an unsupported width.
    """
    width = c.take_count("conv_L_cache", width)
    if not 2 <= width <= 8:
        raise ConfigError(f"{c.name}: conv_L_cache is {width}; expected 2 to 8")
    return GatedConvSpec(c.take_count("hidden_size"), width, c.take_flag("conv_bias", False))


def mixers(c: HFConfig, norm: NormSpec, full: Sequence[int]) -> list[AttentionSpec | GatedConvSpec]:
    """Convolution or attention with normed queries and keys for each layer, by `layer_types`; where the
    config has none, attention in the layers `full`.
    """
    types = layer_types(c, lambda i: FULL if i in full else CONV, (CONV, FULL))
    attn, conv = replace(attention(c, theta=1e6), qk_norm=QKNormSpec(norm)), gated_conv(c, 3)
    return [conv if kind == CONV else attn for kind in types]


def tied(c: HFConfig, spec: ModelSpec) -> ModelSpec:
    """The model with `tie_embedding`, an older name of `tie_word_embeddings` that takes precedence."""
    return replace(spec, tie_word_embeddings=c.take_flag("tie_embedding", spec.tie_word_embeddings))


DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "pad_token_id": 0,
}
TINY: Mapping[str, Any] = {
    "rms_norm_eps": ...,
    "hidden_act": ...,
    "norm_eps": 3e-4,
    "layer_types": [CONV, FULL, CONV],
    "conv_L_cache": 4,
    "conv_bias": False,
    "pad_token_id": 7,
}
