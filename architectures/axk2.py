"""A.X K2 (SK Telecom, 2026): the latent attention, indexers and experts of DeepSeek-V3.2. Queries come
from a latent before and after its norm, with gates of attention next to them, and norms have gates, too.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, expert_layouts, mlp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SHARED_EXPERTS,
    SKIP_EXPERTS,
    SKIP_INDEXER,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_INDEXER,
    TINY_LATENT,
    corrected_experts,
    dense_or_sparse,
    further_predictions,
    indexed_layers,
    indexer,
    latent_attention,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, GatedNormSpec, MLPSpec, ModelSpec, NormSpec

NAMES = (".router.correction_bias", ".gate.e_score_correction_bias"), SHARED_EXPERTS


@register(
    "axk2",
    reference="AXK2ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "q_lora_rank": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 2048,
        "gated_norm_rank": 16,
    },
    layouts=(
        expert_layouts(*NAMES, (".mlp.fc1.", ".W_down."), (".mlp.fc2.", ".W_up."))[0],
        expert_layouts(*NAMES, (".q_b_proj.", ".q_gate_proj."))[1],
    ),
    carried=further_predictions,
)
def axk2(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    gated = GatedNormSpec(norm, c.take_count("gated_norm_rank"))
    indexed_layers(c)
    mixer = replace(
        latent_attention(c, interleaved=True),
        indexer=indexer(c, interleaved=False),
        gated=True,
        raw_q_latent=True,
    )
    first = c.take_count("first_k_dense_replace", 1, least=0)
    in_groups = c.take("n_group", None) is not None
    experts = replace(corrected_experts(c, in_groups=in_groups), group_score="top_2_else_0")
    mlps = dense_or_sparse(c, mlp(c), experts, first)
    blocks = [BlockSpec(mixer, inner, gated, plain_mlp_norm=isinstance(inner, MLPSpec)) for inner in mlps]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "axk2",
    tiny={**TINY_LATENT, **TINY_EXPERTS, **TINY_INDEXER, "gated_norm_rank": 5},
    variants={
        "two dense layers": {"first_k_dense_replace": 2},
        "in groups": IN_GROUPS,
        "no groups": {"n_group": ..., "topk_group": ...},
        "biases": {"attention_bias": True},
        "no key is left out": {"index_topk": 2048},
        "experts by a list": {"first_k_dense_replace": ..., "mlp_layer_types": ["sparse", "dense", "sparse"]},
    },
    skip={**SKIP_LATENT, **SKIP_EXPERTS, **SKIP_INDEXER},
)
