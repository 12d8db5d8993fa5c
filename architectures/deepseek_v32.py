"""DeepSeek-V3.2 (2025, arXiv:2512.02556): DeepSeek-V3 with sparse attention: an indexer in each layer chooses
the keys of each query.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, mlp, mtp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    SKIP_INDEXER,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_INDEXER,
    TINY_LATENT,
    corrected_experts,
    corrected_layouts,
    dense_or_sparse,
    further_predictions,
    indexed_layers,
    indexer,
    latent_attention,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "deepseek_v32",
    reference="DeepseekV32ForCausalLM",
    defaults={
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    layouts=corrected_layouts(),
    carried=further_predictions,
    mtp=mtp.DEEPSEEK,
)
def deepseek_v32(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    indexed_layers(c)
    mixer = replace(latent_attention(c, interleaved=True), indexer=indexer(c, interleaved=False))
    first = c.take_count("first_k_dense_replace", 3, least=0)
    mlps = dense_or_sparse(c, mlp(c), corrected_experts(c), first)
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in mlps], norm)


# -- tests

for_tests(
    "deepseek_v32",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        **TINY_INDEXER,
        **IN_GROUPS,
        "num_nextn_predict_layers": 1,
    },
    variants={
        "biases": {"attention_bias": True},
        "no key is left out": {"index_topk": 2048},
        "older name of the layers": {"layer_types": ["deepseek_sparse_attention"] * 3},
        "experts by a list": {"first_k_dense_replace": ..., "mlp_layer_types": ["sparse", "dense", "sparse"]},
    },
    skip={**SKIP_LATENT, **SKIP_EXPERTS, **SKIP_INDEXER},
)
