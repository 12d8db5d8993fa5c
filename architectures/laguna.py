"""Laguna (Poolside, 2026): QK-norm per head, a softplus gate on attention's output, a number of heads per
layer, and the experts of DeepSeek-V3. Layers with a sliding window have their own rotary.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    by_layer,
    chosen_experts,
    decoder,
    expert_layouts,
    mlp,
    rope,
    windows,
)
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, dense_or_sparse
from liger_models.architectures.common.grouped_attention import check_groups
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec

BIAS = ".experts.e_score_correction_bias"


@register(
    "laguna",
    reference="LagunaForCausalLM",
    layouts=(
        expert_layouts((".router.correction_bias", BIAS))[0],
        expert_layouts((".router.correction_bias", ".gate.e_score_correction_bias"), SHARED_EXPERTS)[1],
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    fixed={"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
)
def laguna(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    share = 1.0 if c.take("rope_parameters", None) else 0.5
    full = attention(
        c, bias=c.take_flag("attention_bias", False), layer_type=FULL, theta=500000.0, partial=share
    )
    by_head = c.take("gating", True) in (True, "per-head")
    full = replace(
        full, qk_norm=QKNormSpec(norm), gates="heads" if by_head else "channels", softplus_gates=True
    )
    local = rope(c, full.head_dim, layer_type=SLIDING, partial=1.0)
    mlps = dense_or_sparse(c, mlp(c), experts(c), 1)
    heads = by_layer(c, "num_attention_heads_per_layer", full.num_attention_heads, whole=True)
    blocks = []
    for count, window, inner in zip(heads, windows(c, lambda i: FULL), mlps, strict=True):
        check_groups(c, count, full.num_key_value_heads)
        mixer = replace(full, num_attention_heads=count, window=window, rope=local if window else full.rope)
        blocks.append(BlockSpec(mixer, inner, norm))
    return decoder(c, blocks, norm)


def experts(c: HFConfig) -> MoESpec:
    """Routed experts, and the shared one."""
    return chosen_experts(
        c,
        score="sigmoid",
        correction_bias=True,
        routed_scaling_factor=c.take_number("moe_routed_scaling_factor", 1.0),
        shared_expert=MLPSpec(c.take_count("shared_expert_intermediate_size"), activation(c)),
    )


# -- tests

for_tests(
    "laguna",
    tiny={
        "attention_bias": True,
        "gating": "per-element",
        "num_attention_heads_per_layer": [4, 2, 6],
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_routed_scaling_factor": 1.7,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rope_parameters": {
            FULL: {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 16,
                "partial_rotary_factor": 1.0,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    variants={
        "gates per head": {"gating": True, "num_attention_heads_per_layer": None},
        "turned in part": {
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            }
        },
        "experts in every layer": {"mlp_layer_types": ["sparse"] * 3},
    },
    skip={
        "refusal:partial_rotary_factor": "a part of each head may turn",
        "variant:kv_heads_as_many_as_heads": "layers have heads in numbers of their own",
        "key:num_local_experts": "another name of num_experts",
        "rope:all": "the reference reads only settings by layer type",
        **{f"key:{key}": "the same" for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")},
    },
)
