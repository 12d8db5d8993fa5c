"""Ministral 3 (Mistral AI, 2025): Mistral with yarn, and queries scaled by position."""

from dataclasses import replace

from liger_models.architectures.common import GROWING_QUERIES, attention, decoder, mlp, query_scale
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@register(
    "ministral3",
    reference="Ministral3ForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "pad_token_id": 11,
    },
)
def ministral3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, window=c.take_count("sliding_window", None), scaling=YARN, extra=GROWING_QUERIES)
    block = BlockSpec(replace(attn, query_scale=query_scale(c, YARN)), mlp(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "ministral3",
    tiny={
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 5,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.6,
        },
        "pad_token_id": 11,
    },
    skip={
        "rope:dynamic": "which begins to stretch elsewhere than the queries begin to grow",
        "field:RopeSpec.max_position_embeddings": "read only by dynamic rotation",
    },
)
