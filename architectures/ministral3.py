"""Ministral 3 (Mistral AI, 2025): Mistral with yarn, and queries that grow with their positions."""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import BlockSpec, ModelSpec, NormSpec, QueryScaleSpec

BETA, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
ROPE: dict[str, Any] = {
    "scaling": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        LENGTH: 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        BETA: 0.1,
    },
    "extra": (BETA, LENGTH, "max_position_embeddings"),  # the last says again what stands outside
}


@register(
    "ministral3",
    reference="Ministral3ForCausalLM",
    tiny={
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            LENGTH: 5,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            BETA: 0.6,
        },
        "pad_token_id": 11,
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "pad_token_id": 11,
    },
    skip={
        "rope:dynamic": "which begins to stretch elsewhere than the queries begin to grow",
        "field:RopeSpec.max_position_embeddings": "read by dynamic rotation alone",
    },
)
def ministral3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, window=c.take_count("sliding_window", None), **ROPE)
    block = BlockSpec(replace(attn, query_scale=query_scale(c)), mlp(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


def query_scale(c: HFConfig) -> QueryScaleSpec:
    settings = c.take_rope(default_scaling=ROPE["scaling"], extra=ROPE["extra"])
    stated = {**settings, **settings["extra"]}
    if not stated.get(BETA) or type(stated.get(LENGTH)) is not int:
        raise ConfigError(
            f"{c.name}: ministral3 models need {BETA} and {LENGTH} in rope_parameters, found "
            f"{stated.get(BETA)} and {stated.get(LENGTH)}"
        )
    return QueryScaleSpec(stated[BETA], stated[LENGTH])
