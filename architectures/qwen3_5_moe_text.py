"""Qwen3.5 with experts (Qwen Team, 2026), text models: Qwen3.5 with many small experts and a gated shared
expert in every layer.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    chosen_experts,
    decoder,
    expert_layouts,
    gated_delta,
    mixers,
    mtp,
)
from liger_models.architectures.qwen3_5_text import (
    DEFAULTS,
    SKIP,
    TINY,
    UNREAD,
    centred_norm,
    gated_attention,
)
from liger_models.architectures.qwen3_next import EXPERTS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec


@register(
    "qwen3_5_moe_text",
    reference="Qwen3_5MoeForCausalLM",
    layouts=expert_layouts(),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "router_aux_loss_coef": 0.001,
    },
    carried=lambda c: ("mtp.*",),
    mtp=mtp.QWEN,
    fixed={"attn_output_gate": True},
    unread=UNREAD,
)
def qwen3_5_moe_text(c: HFConfig) -> ModelSpec:
    norm, experts = centred_norm(c), chosen_experts(c, renormalize=True)
    shared = MLPSpec(c.take_count("shared_expert_intermediate_size"), "silu")
    experts = replace(experts, shared_expert=shared, shared_gate=True)
    linear, attn = gated_delta(c, "qkv", norm.eps), gated_attention(c, norm, text_of_images=True)
    return decoder(c, [BlockSpec(mixer, experts, norm) for mixer in mixers(c, linear, attn)], norm)


# -- tests

for_tests(
    "qwen3_5_moe_text",
    tiny={**TINY, **EXPERTS, "intermediate_size": ...},
    variants={"every_second": {"layer_types": ..., "full_attention_interval": 2}},
    skip={
        **SKIP,
        "refusal:mrope": "text has one position on all axes",
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
