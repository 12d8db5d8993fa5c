"""Solar Open (Upstage, 2026, arXiv:2601.07022): grouped-query attention, and the experts of DeepSeek-V3 in
every layer.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    TINY_EXPERTS,
    corrected_experts,
    corrected_layouts,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "solar_open",
    reference="SolarOpenForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    layouts=corrected_layouts(),
    fixed={"first_k_dense_replace": 0},
    unread={"intermediate_size": "every layer has experts"},
)
def solar_open(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, bias=c.take_flag("attention_bias", False), theta=1e6)
    block = BlockSpec(replace(attn, o_bias=False), corrected_experts(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "solar_open",
    tiny={**TINY_EXPERTS, "first_k_dense_replace": ..., "attention_bias": True},
    variants={"in groups": IN_GROUPS},
    skip={**SKIP_EXPERTS, "refusal:intermediate_size": "has no effect"},
)
