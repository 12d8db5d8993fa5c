"""dots.llm1 (rednote hilab, 2025, arXiv:2506.05767): the attention of Qwen3 and the experts of DeepSeek-V3.
The first layers have no experts.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, windows
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    TINY_EXPERTS,
    corrected_experts,
    corrected_layouts,
    dense_then,
)
from liger_models.architectures.qwen3 import normed_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

SCORES = ("sigmoid", "noaux_tc")  # fixed in the reference; the second names the choice that they make


@register(
    "dots1",
    reference="Dots1ForCausalLM",
    defaults={"num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "sliding_window": 4096},
    layouts=corrected_layouts(),
)
def dots1(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn, mlps = normed_attention(c, norm), dense_then(c, corrected_experts(c, SCORES))
    window, first = c.take_count("sliding_window", None), c.take_number("max_window_layers", 62)
    slides = windows(c, lambda i: "sliding_attention" if window and i >= first else "full_attention")
    blocks = [BlockSpec(replace(attn, window=w), inner, norm) for w, inner in zip(slides, mlps, strict=True)]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "dots1",
    tiny={
        **TINY_EXPERTS,
        "attention_bias": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    variants={
        "in groups": IN_GROUPS,
        "layer_types": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "no window": {"sliding_window": None},
    },
    skip=SKIP_EXPERTS,
)
