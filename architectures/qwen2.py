"""Qwen2, Qwen2.5 and QwQ (Yang et al., 2024, arXiv:2407.10671; 2412.15115): LLaMA with biases on queries,
keys and values, and in some configs a sliding window on the upper layers.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "qwen2",
    reference="Qwen2ForCausalLM",
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32},
)
def qwen2(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn, feed_forward = replace(attention(c), qkv_bias=True), mlp(c)
    blocks = [BlockSpec(replace(attn, window=w), feed_forward, norm) for w in upper_windows(c)]
    return decoder(c, blocks, norm)


def upper_windows(c: HFConfig) -> list[int | None]:
    """Window of each layer: with `use_sliding_window`, from layer `max_window_layers` on."""
    slides = c.take_flag("use_sliding_window", False) and c.take_count("sliding_window", None) is not None
    first = c.take_number("max_window_layers", 28)
    return windows(
        c, lambda i: "sliding_attention" if slides and i >= first else "full_attention", off=not slides
    )


# -- tests

for_tests(
    "qwen2",
    tiny={"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    variants={"layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}},
)
