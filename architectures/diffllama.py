"""DiffLlama (weak-kajuma, 2024, arXiv:2410.05258): LLaMA with differential attention, the difference of
two attentions to the same values.
"""

import math

from liger_models.architectures.common import attention, decoder, mlp, rope
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, DifferentialAttentionSpec, ModelSpec, NormSpec


@register(
    "diffllama",
    reference="DiffLlamaForCausalLM",
    defaults={"max_position_embeddings": 2048},
    fixed={"lambda_std_dev": 0.1},  # of fresh weights
)
def diffllama(c: HFConfig) -> ModelSpec:
    eps = c.take_number("rms_norm_eps", 1e-5)
    attn, inner, norm = attention(c, positions=False), mlp(c), NormSpec(eps=eps)
    bias = c.take_flag("attention_bias", False)
    if attn.num_key_value_heads % 2 or attn.num_attention_heads % 2:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {attn.num_attention_heads} and num_key_value_heads "
            f"{attn.num_key_value_heads}; differential attention needs even numbers"
        )
    heads = attn.num_attention_heads, attn.num_key_value_heads, attn.head_dim, attn.scale
    turned = rope(c, attn.head_dim)
    blocks = [
        BlockSpec(
            DifferentialAttentionSpec(*heads, turned, 0.8 - 0.6 * math.exp(-0.3 * layer), eps, bias),
            inner,
            norm,
        )
        for layer in range(c.take_count("num_hidden_layers"))
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "diffllama",
    # With a small epsilon the norm of heads cancels lambda: its gradient would be only rounding.
    tiny={"attention_bias": True, "rms_norm_eps": 0.5},
    skip={
        "variant:one_kv_head": "heads form pairs",
        "published:config": "no copy was at hand",
    },
)
