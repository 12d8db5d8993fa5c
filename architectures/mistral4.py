"""Mistral Small 4 (Mistral AI, 2026): latent attention with queries that grow with their positions, and
experts weighed by a softmax, beside some that all tokens share.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    GROWING_QUERIES,
    activation,
    decoder,
    dense_then,
    experts_and_chosen,
    groups_and_chosen,
    latent_attention,
    query_scale,
)
from liger_models.architectures.ministral3 import YARN as MINISTRAL_YARN
from liger_models.architectures.registry import register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.spec import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

YARN = {**MINISTRAL_YARN, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
SHARED = (".shared_expert.", ".shared_experts.")


@register(
    "mistral4",
    reference="Mistral4ForCausalLM",
    layouts=(Layout((SHARED, (".router.", ".gate.")), whole=("*.experts.*",)),),
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
    variants={
        "no latent of queries": {"q_lora_rank": None},
        "biases": {"attention_bias": True},
        "rotated by halves": {"rope_interleave": False},
        "one group, not renormalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    },
    skip={
        "variant:one_kv_head": "latent attention has a key head for each query head",
        "key:head_dim": "follows from the sizes of its parts, and is checked",
        "key:qk_head_dim": "the same",
        "key:num_local_experts": "another name of n_routed_experts",
        "rope:default": "of which the reference makes tables for whole heads, and fails",
        "rope:dynamic": "which begins to stretch elsewhere than the queries begin to grow",
        "field:RopeSpec.max_position_embeddings": "read by dynamic rotation alone",
    },
)
def mistral4(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    mixer = latent_attention(c, partial=True, scaling=YARN, extra=GROWING_QUERIES)
    mixer = replace(mixer, query_scale=query_scale(c, YARN))
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in dense_then(c, experts(c))], norm)


def experts(c: HFConfig) -> MoESpec:
    num_experts, top_k = experts_and_chosen(c, ("n_routed_experts", "num_local_experts"))
    groups, top_groups = groups_and_chosen(c, num_experts, top_k, smallest=2)
    inner, act = c.take_count("moe_intermediate_size"), activation(c)
    return MoESpec(
        num_experts,
        top_k,
        inner,
        act,
        renormalize=c.take_flag("norm_topk_prob", False),
        num_groups=groups,
        top_groups=top_groups,
        routed_scaling_factor=c.take_number("routed_scaling_factor", 1.0),
        shared_expert=MLPSpec(c.take_count("n_shared_experts") * inner, act),
    )
