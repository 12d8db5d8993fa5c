"""Seed-OSS (ByteDance, 2025): LLaMA with biases on queries, keys and values."""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "seed_oss",
    reference="SeedOssForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "pad_token_id": 1,
    },
)
def seed_oss(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = replace(
        attention(c),
        qkv_bias=c.take_flag("attention_bias", True),
        o_bias=c.take_flag("attention_out_bias", False),
        dropout=c.take_dropout("attention_dropout"),
    )
    feed_forward, dropout = mlp(c, bias=c.take_flag("mlp_bias", False)), c.take_dropout("residual_dropout")
    block = BlockSpec(attn, feed_forward, norm, dropout=dropout)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "seed_oss",
    tiny={
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "pad_token_id": 0,
    },
)
