"""Helium 1 (Kyutai, 2025): LLaMA with interleaved rotary and norms that round after multiplication by their
weights.
"""

from dataclasses import replace

from liger_models.architectures.common import attention_as_wide_as_the_model, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "helium",
    reference="HeliumForCausalLM",
    defaults={"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096, "pad_token_id": 3},
)
def helium(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-8), cast="float32")
    attn = attention_as_wide_as_the_model(c, interleaved=True, theta=100000.0)
    attn = replace(attn, qkv_bias=c.take_flag("attention_bias", False))
    block = BlockSpec(attn, mlp(c, bias=c.take_flag("mlp_bias", False)), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "helium",
    tiny={"head_dim": 12, "attention_bias": True, "mlp_bias": True},
    skip={"variant:head_dim_apart": "heads are as wide together as the hidden state, which is checked"},
)
