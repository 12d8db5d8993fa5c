"""DeepSeek-V3 and R1 (2024, arXiv:2412.19437), Kimi K2: multi-head latent attention, and grouped experts
balanced by a correction bias instead of a loss. The first layers have no experts.
"""

from liger_models.architectures.common import decoder, mtp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    LATENT_VARIANTS,
    SKIP_EXPERTS,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_LATENT,
    corrected_experts,
    corrected_layouts,
    dense_then,
    further_predictions,
    latent_attention,
)
from liger_models.architectures.deepseek_v2 import LOSS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "deepseek_v3",
    reference="DeepseekV3ForCausalLM",
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
    mtp=mtp.DEEPSEEK,
    unread=LOSS,
)
def deepseek_v3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attention, mlps = latent_attention(c), dense_then(c, corrected_experts(c))
    return decoder(c, [BlockSpec(attention, inner, norm) for inner in mlps], norm)


# -- tests

for_tests(
    "deepseek_v3",
    tiny={**TINY_LATENT, **TINY_EXPERTS, **IN_GROUPS, "num_nextn_predict_layers": 1},
    variants={
        **LATENT_VARIANTS,
        "one group, not renormalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    },
    skip={**SKIP_LATENT, **SKIP_EXPERTS},
)
