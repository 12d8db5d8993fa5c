"""Sarvam 105B (Sarvam AI, 2026): DeepSeek-V3's layers without a latent of queries, and with YaRN."""

from liger_models.architectures.common import decoder
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
    latent_attention,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.architectures.sarvam_moe import DEFAULTS, FIXED, OTHER_NAMES, UNREAD
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "sarvam_mla",
    reference="DeepseekV3ForCausalLM",
    reference_of="deepseek_v3",
    layouts=corrected_layouts(),
    other_names=OTHER_NAMES,
    defaults={
        **DEFAULTS,
        **{"rope_interleave": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        **{"v_head_dim": 128, "max_position_embeddings": 4096, "moe_intermediate_size": 2048},
        **{"n_routed_experts": 128, "num_experts_per_tok": 8},
    },
    fixed=FIXED,
    unread={**UNREAD, "use_qk_norm": "the latents have norms in any case"},
)
def sarvam_mla(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    mixer, mlps = latent_attention(c), dense_then(c, corrected_experts(c))
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in mlps], norm)


# -- tests

for_tests(
    "sarvam_mla",
    tiny={**TINY_LATENT, **TINY_EXPERTS, "q_lora_rank": ...},
    variants={
        **LATENT_VARIANTS,
        "a latent of queries": {"q_lora_rank": 28},
        "in groups": IN_GROUPS,
        "experts in every layer": {"first_k_dense_replace": 0},
        "own names": {
            **{"n_routed_experts": ..., "num_experts": 12, "n_shared_experts": ..., "num_shared_experts": 3},
            **{"head_dim": 26, "q_head_dim": 16, "output_dropout": 0.0},
            "rope_scaling": {
                **{"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 16},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
            },
            "rope_parameters": ...,
        },
    },
    skip={
        **SKIP_LATENT,
        **SKIP_EXPERTS,
        "key:num_key_value_heads": "latent attention has a key head for each query head",
    },
)
