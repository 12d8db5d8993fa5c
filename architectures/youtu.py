"""Youtu-LLM (Tencent, 2025, arXiv:2512.24618): DeepSeek-V3's latent attention in a model without experts."""

from dataclasses import replace

from liger_models.architectures.common import decoder, mlp
from liger_models.architectures.common.deepseek import (
    LATENT_VARIANTS,
    SKIP_LATENT,
    TINY_LATENT,
    latent_attention,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, Normal, NormSpec


@register(
    "youtu",
    reference="YoutuForCausalLM",
    defaults={
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
)
def youtu(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    block = BlockSpec(latent_attention(c), mlp(c), norm)
    model = decoder(c, [block] * c.take_count("num_hidden_layers"), norm)
    usual = 2 / (5 * model.hidden_size) ** 0.5
    std = c.take_number("initializer_range", usual)
    embedding = Normal(c.take_number("embedding_initializer_range", 2 * std))
    return replace(model, initializer_range=std, fresh=(("embed_tokens.weight", embedding),))


# -- tests

for_tests(
    "youtu",
    tiny={
        **TINY_LATENT,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
        "embedding_initializer_range": 0.3,
    },
    variants=LATENT_VARIANTS,
    skip=SKIP_LATENT,
)
