"""Mistral Small 4 (Mistral AI, 2026): latent attention with queries scaled by position, and experts weighted
by a softmax next to shared ones.
"""

from dataclasses import replace

from liger_models.architectures.common import GROWING_QUERIES, decoder, expert_layouts, query_scale
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    LATENT_VARIANTS,
    SHARED_EXPERTS,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_LATENT,
    dense_then,
    latent_attention,
    routed_and_shared_experts,
)
from liger_models.architectures.ministral3 import YARN as MINISTRAL_YARN
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

YARN = {**MINISTRAL_YARN, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


@register(
    "mistral4",
    reference="Mistral4ForCausalLM",
    layouts=expert_layouts(SHARED_EXPERTS)[1:],  # all experts in one tensor
    defaults={
        "rope_interleave": True,
        "num_key_value_heads": 32,
        "q_lora_rank": 1024,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 1048576,
        "pad_token_id": 11,
    },
)
def mistral4(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    mixer = latent_attention(c, partial=True, scaling=YARN, extra=GROWING_QUERIES)
    mixer = replace(mixer, query_scale=query_scale(c, YARN))
    renormalize = c.take_flag("norm_topk_prob", False)
    sparse = routed_and_shared_experts(c, ("n_routed_experts", "num_local_experts"), renormalize=renormalize)
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in dense_then(c, sparse)], norm)


# -- tests

for_tests(
    "mistral4",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        **IN_GROUPS,
        "rope_parameters": {
            **YARN,
            "factor": 8.0,
            "original_max_position_embeddings": 5,
            "mscale_all_dim": 0.4,
            "llama_4_scaling_beta": 0.25,
            "partial_rotary_factor": 0.375,
        },
        "pad_token_id": 11,
    },
    variants={
        **LATENT_VARIANTS,
        "one group, not renormalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    },
    skip={
        **SKIP_LATENT,
        "key:num_local_experts": "another name of n_routed_experts",
        "rope:default": "the reference makes tables for whole heads, and fails",
        "rope:dynamic": "which begins to stretch elsewhere than the queries begin to grow",
        "field:RopeSpec.max_position_embeddings": "read only by dynamic rotation",
    },
)
