"""GLM-4.5 to 4.7 (Zeng et al., 2025, arXiv:2508.06471): grouped-query attention with partial rotary, and the
experts of DeepSeek-V3. The first layers have no experts.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mtp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    TINY_EXPERTS,
    corrected_experts,
    corrected_layouts,
    dense_then,
    further_predictions,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "glm4_moe",
    reference="Glm4MoeForCausalLM",
    defaults={"num_key_value_heads": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    layouts=corrected_layouts(),
    carried=further_predictions,
    mtp=mtp.DEEPSEEK,
)
def glm4_moe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    mixer = attention(c, partial=0.5, bias=c.take_flag("attention_bias", False))
    qk_norm = QKNormSpec(norm) if c.take_flag("use_qk_norm", False) else None
    mixer = replace(mixer, o_bias=False, qk_norm=qk_norm)
    mlps = dense_then(c, corrected_experts(c), first_dense=1)
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in mlps], norm)


# -- tests

for_tests(
    "glm4_moe",
    tiny={
        **TINY_EXPERTS,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    variants={
        "in groups": IN_GROUPS,
        "experts in every layer": {"first_k_dense_replace": 0},
    },
    skip={
        **SKIP_EXPERTS,
        "null:rope_parameters": "the reference then has no theta, and fails",
        "null:head_dim": "the reference then fails",
        "refusal:partial_rotary_factor": "a part of each head turns",
    },
)
