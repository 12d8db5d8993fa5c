"""MiniCPM3 (OpenBMB, 2024, arXiv:2404.06395): latent attention without experts, and factors of embeddings,
branches and logits.
"""

from liger_models.architectures.common import decoder, mlp
from liger_models.architectures.common.deepseek import SKIP_LATENT, TINY_LATENT, latent_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "minicpm3",
    reference="MiniCPM3ForCausalLM",
    defaults={
        "num_key_value_heads": 40,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 32768,
        "initializer_range": 0.1,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
    },
    fixed={"rope_interleave": False},  # not read by the reference
)
def minicpm3(c: HFConfig) -> ModelSpec:
    width, layers = c.take_count("hidden_size"), c.take_count("num_hidden_layers")
    c.fill({"v_head_dim": width // c.take_count("num_attention_heads")})
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    depth = c.take_number("scale_depth", layers**0.5)
    block = BlockSpec(
        latent_attention(c),
        mlp(c, bias=c.take_flag("mlp_bias", False)),
        norm,
        residual_scale=depth / layers**0.5,
    )
    return decoder(
        c,
        [block] * layers,
        norm,
        embed_scale=c.take_number("scale_emb", 12),
        logit_scale=c.take_count("dim_model_base", width) / width,
    )


# -- tests

for_tests(
    "minicpm3",
    tiny={
        **TINY_LATENT,
        "rms_norm_eps": 1e-3,
        "rope_interleave": ...,
        "v_head_dim": 14,
        "attention_bias": True,
        "mlp_bias": True,
        "scale_emb": 1.5,
        "scale_depth": 1.2,
        "dim_model_base": 30,
        "tie_word_embeddings": True,
    },
    skip=SKIP_LATENT,
)
