"""GLM-5 (Z.ai, 2026): the latent attention, the indexers and the experts of DeepSeek-V3.2 in other sizes. A
list says which layers choose keys, and which reuse the choice of the layer before them.
"""

from liger_models.architectures.common import decoder, mlp, mtp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    SKIP_INDEXER,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_INDEXER,
    TINY_LATENT,
    choices_of_keys,
    corrected_experts,
    corrected_layouts,
    dense_or_sparse,
    further_predictions,
    indexed_layers,
    indexer,
    latent_attention,
    older_choices,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "glm_moe_dsa",
    reference="GlmMoeDsaForCausalLM",
    defaults={
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    layouts=corrected_layouts(),
    carried=further_predictions,
    mtp=mtp.DEEPSEEK,
    unread={"index_share_for_mtp_iteration": "modules for multi-token prediction choose keys of their own"},
)
def glm_moe_dsa(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    indexed_layers(c)
    layers = [latent_attention(c, interleaved=True)] * c.take_count("num_hidden_layers")
    choices = choices_of_keys(c, layers, indexer(c, interleaved=True), older_choices(c))
    first = c.take_count("first_k_dense_replace", 3, least=0)
    mlps = dense_or_sparse(c, mlp(c), corrected_experts(c), first)
    blocks = [BlockSpec(mixer, inner, norm) for mixer, inner in zip(choices, mlps, strict=True)]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "glm_moe_dsa",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        **TINY_INDEXER,
        "indexer_types": ["full", "shared", "full"],
        "num_nextn_predict_layers": 1,
    },
    variants={
        "in groups": IN_GROUPS,
        "biases": {"attention_bias": True},
        "no key is left out": {"index_topk": 2048},
        "experts by a list": {"first_k_dense_replace": ..., "mlp_layer_types": ["sparse", "dense", "sparse"]},
        "by a pattern": {"indexer_types": ..., "index_topk_pattern": "FSS"},
        "by a frequency": {"indexer_types": ..., "index_topk_freq": 2, "index_skip_topk_offset": 1},
    },
    skip={**SKIP_LATENT, **SKIP_EXPERTS, **SKIP_INDEXER},
)
