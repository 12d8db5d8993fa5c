"""Command A with experts (Cohere, 2026): Command R7B with experts, and with shared ones that are added to the
chosen or averaged with them. The first layers may have none.
"""

from dataclasses import replace

from liger_models.architectures.cohere import DEFAULTS
from liger_models.architectures.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    decoder,
    expert_layouts,
    experts_and_chosen,
    windows,
)
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, dense_or_sparse
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, MLPSpec, ModelSpec, MoESpec, NormSpec


@register(
    "cohere2_moe",
    reference="Cohere2MoeForCausalLM",
    layouts=expert_layouts(SHARED_EXPERTS),
    defaults={
        **DEFAULTS,
        "head_dim": 128,
        "sliding_window": 4096,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    fixed={"rope_scaling": None},  # the reference ignores it; in rope_parameters it has an effect
)
def cohere2_moe(c: HFConfig) -> ModelSpec:
    norm: NormSpec | LayerNormSpec = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5), bias=False)
    if (eps := c.take_number("rms_norm_eps", None)) is not None:
        norm = NormSpec(eps=eps)
    attn = attention(c, bias=c.take_flag("attention_bias", False), interleaved=True)
    first = c.take_count("first_k_dense_replace", 0, least=0)
    every = c.take_count("sliding_window_pattern", 4)
    every_dense = c.take_count("prefix_dense_sliding_window_pattern", 1)

    def usual(i: int) -> str:
        beyond = (i + 1) % every_dense if i < first else (i - first + 1) % every
        return SLIDING if beyond else FULL

    act = activation(c)
    dense = MLPSpec(c.take_count("prefix_dense_intermediate_size", c.take_count("intermediate_size")), act)
    mlps = dense_or_sparse(c, dense, experts(c), first)
    blocks = []
    for window, inner in zip(windows(c, usual), mlps, strict=True):
        turns = window is not None or (inner == dense and every_dense == 1)
        mixer = replace(attn, window=window, rope=attn.rope if turns else None)
        blocks.append(BlockSpec(mixer, inner, norm, "parallel"))
    return decoder(c, blocks, norm, logit_scale=c.take_number("logit_scale"))


def experts(c: HFConfig) -> MoESpec:
    """Routed experts, and the shared ones as one MLP."""
    width, act = c.take_count("intermediate_size"), activation(c)
    renormalize, shared = c.take_flag("norm_topk_prob", True), c.take_count("num_shared_experts", 0, least=0)
    choice = c.take_choice("expert_selection_fn", "softmax", "sigmoid")
    sum_up = c.take_choice("shared_expert_combination_strategy", "average", "sum")
    moe = MoESpec(*experts_and_chosen(c), width, act)
    if choice == "softmax":
        moe = replace(moe, softmax_after_top_k=True)
    else:
        moe = replace(moe, score="sigmoid", renormalize=renormalize)
    if not shared:
        return moe
    share = 0.5 if sum_up == "average" else 1.0
    return replace(
        moe, shared_expert=MLPSpec(shared * width, act), shared_scale=share, routed_scaling_factor=share
    )


# -- tests

for_tests(
    "cohere2_moe",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "intermediate_size": 32,
        "logit_scale": 0.3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
    },
    variants={
        "older spelling": {"rope_parameters": ..., "rope_theta": 500.0},
        "scaled positions": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
            "layer_types": [SLIDING] * 3,
        },
        "sum": {"shared_expert_combination_strategy": "sum"},
        "none shared": {"num_shared_experts": 0},
        "sigmoid": {"expert_selection_fn": "sigmoid"},
        "sigmoid, not renormalised": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        "RMSNorm": {"rms_norm_eps": 1e-4},
        "dense layers with windows": {
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
            "prefix_dense_intermediate_size": None,
        },
        "layer types": {
            "layer_types": [FULL, SLIDING, FULL],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "first_k_dense_replace": ...,
        },
    },
    skip={
        "rope:all": "in the older spelling the reference drops the scaling",
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "renormalised shares of all are the same function",
        "null:layer_norm_eps": "the reference cannot run with it",
    },
)
