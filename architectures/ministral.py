"""Ministral 8B (Mistral AI, 2024): Mistral with a sliding window on some layers only."""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "ministral",
    reference="MinistralForCausalLM",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)
def ministral(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn, feed_forward = attention(c), mlp(c)
    usual = "full_attention" if c.take_count("sliding_window", None) is None else "sliding_attention"
    blocks = [BlockSpec(replace(attn, window=w), feed_forward, norm) for w in windows(c, lambda i: usual)]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "ministral",
    tiny={
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
)
