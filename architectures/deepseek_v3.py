"""DeepSeek-V3 and R1 (2024, arXiv:2412.19437), Kimi K2: latent attention, and experts in groups, whose load
is balanced by a bias and not by a loss. The first layers have no experts.
"""

from liger_models.architectures.common import (
    corrected_experts,
    corrected_layouts,
    decoder,
    dense_then,
    further_predictions,
    latent_attention,
)
from liger_models.architectures.deepseek_v2 import LOSS
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.spec import BlockSpec, ModelSpec, NormSpec


@register(
    "deepseek_v3",
    reference="DeepseekV3ForCausalLM",
    tiny={
        "num_key_value_heads": 4,
        "rope_interleave": True,
        "head_dim": ...,
        "moe_intermediate_size": 24,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-3,
        "num_nextn_predict_layers": 1,
    },
    defaults={
        "rope_interleave": True,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    layouts=corrected_layouts(),
    carried=further_predictions,
    skip={
        "variant:one_kv_head": "latent attention has a key head for each query head",
        "key:head_dim": "follows from the sizes of its parts, and is checked",
        "key:qk_head_dim": "the same",
        "key:scoring_func": "has one value",
        "key:topk_method": "has one value",
        "key:moe_layer_freq": "has one value",
        **{f"key:{key}": "the reference does not read it" for key in LOSS},
    },
    variants={
        "no latent of queries": {"q_lora_rank": None},
        "biases": {"attention_bias": True},
        "rotated by halves": {"rope_interleave": False},
        "one group, not renormalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    },
)
def deepseek_v3(c: HFConfig) -> ModelSpec:
    for key in LOSS:
        c.take(key, None)
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attention, mlps = latent_attention(c), dense_then(c, corrected_experts(c))
    return decoder(c, [BlockSpec(attention, inner, norm) for inner in mlps], norm)
