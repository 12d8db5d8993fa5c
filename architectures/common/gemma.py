"""Shared parts of Gemma 2, 3 and 4: embeddings scaled by the root of their width, and soft caps on logits;
and parts of Gemma 3n: its residual streams and sparse MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.architectures.common.mlps import activation
from liger_models.architectures.common.model import by_layer, decoder
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AltUpSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec


def scaled_decoder(c: HFConfig, blocks: Sequence[BlockSpec], norm: NormSpec, **settings: Any) -> ModelSpec:
    """A model of these blocks; `settings` as for `decoder`."""
    return decoder(
        c,
        blocks,
        norm,
        embed_scale=c.take_count("hidden_size") ** 0.5,
        logit_softcap=c.take_number("final_logit_softcapping", None),
        **settings,
    )


def alternating_streams(c: HFConfig) -> AltUpSpec:
    """The residual streams of Gemma 3n.

    Raises:
        ConfigError: the active stream is none of them.
    """
    count, active = c.take_count("altup_num_inputs"), c.take_count("altup_active_idx", least=0)
    if active >= count:
        raise ConfigError(f"{c.name}: altup_active_idx is {active}; expected less than {count}, the streams")
    limit = c.take_number("altup_coef_clip", positive=True)
    return AltUpSpec(count, active, limit, c.take_flag("altup_correct_scale", True))


def sparse_mlps(c: HFConfig) -> list[MLPSpec]:
    """The MLP of each layer of Gemma 3n, with a width for all or for each, and a share of gates that are cut
    off; by default 0.95 in the first 10 of more than 10 layers.

    Raises:
        ConfigError: not one width and one share for each layer, or a share of 1.
    """
    count, sizes = c.take_count("num_hidden_layers"), c.take("intermediate_size")
    if isinstance(sizes, list):
        sizes = by_layer(c, "intermediate_size", sizes, whole=True)
    else:
        sizes = [c.take_count("intermediate_size")] * count
    usual = [0.95] * 10 + [0.0] * (count - 10) if count > 10 else [0.0] * count
    shares = by_layer(c, "activation_sparsity_pattern", usual)
    if max(shares) >= 1:
        raise ConfigError(f"{c.name}: activation_sparsity_pattern has {max(shares)}; expected less than 1")
    act = activation(c, "hidden_activation")
    return [MLPSpec(size, act, sparsity=float(share)) for size, share in zip(sizes, shares, strict=True)]


TINY: Mapping[str, Any] = {
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": True,
    "final_logit_softcapping": 2.0,
    "sliding_window": 7,
    "tie_word_embeddings": True,
}
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
