"""dots.llm1 (rednote hilab, 2025, arXiv:2506.05767): the attention of Qwen3 and the experts of DeepSeek-V3.
The first layers have no experts.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    corrected_experts,
    corrected_layouts,
    decoder,
    dense_then,
    windows,
)
from liger_models.architectures.qwen3 import normed_attention
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.spec import BlockSpec, ModelSpec, NormSpec

SCORES = ("sigmoid", "noaux_tc")  # which the reference takes for granted; the second names the choice by them


@register(
    "dots1",
    reference="Dots1ForCausalLM",
    tiny={
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "rms_norm_eps": 1e-3,
    },
    defaults={"num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "sliding_window": 4096},
    layouts=corrected_layouts(),
    variants={
        "in groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        "layer_types": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "no window": {"sliding_window": None},
    },
    skip={f"key:{key}": "has one value" for key in ("scoring_func", "topk_method", "moe_layer_freq")},
)
def dots1(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn, mlps = normed_attention(c, norm), dense_then(c, corrected_experts(c, SCORES))
    window, first = c.take_count("sliding_window", None), c.take("max_window_layers", 62)
    slides = windows(c, lambda i: "sliding_attention" if window and i >= first else "full_attention")
    blocks = [BlockSpec(replace(attn, window=w), inner, norm) for w, inner in zip(slides, mlps, strict=True)]
    return decoder(c, blocks, norm)
