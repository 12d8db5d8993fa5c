"""Mellum 2 (JetBrains, 2026): Qwen3's attention and experts, and layers with a sliding window and rotary
settings of their own.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    attention,
    chosen_experts,
    decoder,
    expert_layouts,
    mlp,
    rope,
    windows,
)
from liger_models.architectures.common.deepseek import dense_or_sparse
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "mellum",
    reference="MellumForCausalLM",
    layouts=expert_layouts(),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "moe_intermediate_size": 896,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    carried=lambda c: ("mtp.*",),
    unread={
        f"mtp_{key}": "layers that predict further tokens do not run"
        for key in ("layer_types", "mlp_layer_types")
    },
)
def mellum(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    full = attention(c, bias=c.take_flag("attention_bias", False), layer_type=FULL, theta=500000.0)
    full = replace(full, qk_norm=QKNormSpec(norm))
    sliding = replace(full, rope=rope(c, full.head_dim, layer_type=SLIDING))
    sparse = chosen_experts(c, renormalize=c.take_flag("norm_topk_prob", True))
    mlps = dense_or_sparse(c, mlp(c), sparse, 0)
    blocks = [
        BlockSpec(replace(sliding, window=window) if window else full, inner, norm)
        for window, inner in zip(windows(c, lambda i: FULL), mlps, strict=True)
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "mellum",
    tiny={
        "attention_bias": True,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 32,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rope_parameters": {
            FULL: {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    skip={
        "rope:all": "the reference reads only settings by layer type",
        **{f"key:{key}": "the same" for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")},
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
