"""K-EXAONE (LG AI Research, 2026, arXiv:2601.01739): the experts of DeepSeek-V3, QK-norm per head, and a
sliding window on three of every four layers; only those have positions.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    attention,
    decoder,
    expert_layouts,
    mlp,
    windows,
)
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SHARED_EXPERTS,
    TINY_EXPERTS,
    corrected_layouts,
    dense_or_sparse,
    routed_and_shared_experts,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec

BIAS = (".router.correction_bias", ".e_score_correction_bias")


@register(
    "exaone_moe",
    reference="ExaoneMoeForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": 0,
    },
    layouts=(expert_layouts(BIAS, SHARED_EXPERTS)[0], corrected_layouts()[1]),
    carried=lambda c: ("mtp.*",),
)
def exaone_moe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = replace(attention(c), qk_norm=QKNormSpec(norm))
    sparse = routed_and_shared_experts(
        c,
        ("num_experts", "num_local_experts"),
        shared="num_shared_experts",
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", True),
        correction_bias=True,
        float32_router=True,
    )
    first = c.take_count("first_k_dense_replace", 1, least=0)
    mlps = dense_or_sparse(c, mlp(c), sparse, first)
    every = c.take("sliding_window_pattern", 4)

    def usual(layer: int) -> str:
        if type(every) is not int or every < 1:
            raise ConfigError(
                f"{c.name}: without layer_types, sliding_window_pattern must be a whole number of 1 or more, "
                f"found {every!r}; give layer_types"
            )
        return SLIDING if (layer + 1) % every else FULL

    blocks = [
        BlockSpec(replace(attn, window=window, rope=attn.rope if window else None), inner, norm)
        for window, inner in zip(windows(c, usual), mlps, strict=True)
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "exaone_moe",
    tiny={
        **TINY_EXPERTS,
        "n_routed_experts": ...,
        "n_shared_experts": ...,
        "first_k_dense_replace": 2,
        "num_experts": 8,
        "num_shared_experts": 2,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
    },
    variants={
        "in groups": IN_GROUPS,
        "layer types": {
            "layer_types": [FULL, SLIDING, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window_pattern": "LLG",
        },
    },
    skip={
        "key:num_local_experts": "another name of num_experts",
        "swap:model.layers.1.self_attn.q_norm.weight": "without positions only the product of both counts",
    },
)
