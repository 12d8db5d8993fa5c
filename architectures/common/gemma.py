"""Shared parts of Gemma 2, 3 and 4: embeddings scaled by the root of their width, and soft caps on logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.architectures.common.model import decoder
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


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
