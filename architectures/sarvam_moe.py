"""Sarvam 30B (Sarvam AI, 2026): GLM-4.5's layers, with positions in whole heads; queries, keys and values are
one matrix in checkpoints.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, expert_layouts
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SHARED_EXPERTS,
    SKIP_EXPERTS,
    TINY_EXPERTS,
    corrected_experts,
    corrected_layouts,
    dense_then,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec

NAMES = (
    *((".embed_tokens.", ".word_embeddings."), SHARED_EXPERTS),
    *((".self_attn.q_norm.", ".self_attn.query_layernorm."), (".k_norm.", ".key_layernorm.")),
    *((".self_attn.o_proj.", ".self_attn.dense."), (".self_attn.", ".attention.")),
    (".router.correction_bias", ".gate.expert_bias"),
)
OTHER_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.006,
}
FIXED = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
UNREAD = {
    "num_mtp_layers": "checkpoints have no such modules",
    "max_window_layers": "no layer has a window",
    "router_dtype": "scores are float32",
}


@register(
    "sarvam_moe",
    reference="Glm4MoeForCausalLM",
    reference_of="glm4_moe",
    layouts=(
        replace(
            expert_layouts(*NAMES)[0],
            joined=(Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), within="layers."),),
        ),
        corrected_layouts()[1],
    ),
    other_names={**OTHER_NAMES, "use_qkv_bias": "attention_bias"},
    defaults={
        **DEFAULTS,
        **{"num_key_value_heads": 4, "head_dim": 64, "use_qk_norm": True, "num_experts_per_tok": 6},
        **{"moe_intermediate_size": 1024, "n_routed_experts": 128, "max_position_embeddings": 131072},
        "pad_token_id": 0,
    },
    fixed=FIXED,
    unread=UNREAD,
)
def sarvam_moe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    bias = c.take_flag("attention_bias", False)
    mixer = replace(attention(c, partial=1.0, theta=8e6, bias=bias), o_bias=False)
    mixer = replace(mixer, qk_norm=QKNormSpec(norm) if c.take_flag("use_qk_norm", True) else None)
    mlps = dense_then(c, corrected_experts(c))
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in mlps], norm)


# -- tests

for_tests(
    "sarvam_moe",
    tiny={**TINY_EXPERTS, "use_qk_norm": True, "attention_bias": True},
    variants={
        "in groups": IN_GROUPS,
        "experts in every layer": {"first_k_dense_replace": 0},
        "own names": {
            **{"n_routed_experts": ..., "num_experts": 6, "n_shared_experts": ..., "num_shared_experts": 3},
            **{"attention_bias": ..., "use_qkv_bias": True, "output_dropout": 0.0},
        },
    },
    skip={**SKIP_EXPERTS, "refusal:partial_rotary_factor": "a part of each head may turn"},
)
