"""Code World Model (Meta, 2025, arXiv:2510.02387): LLaMA 3 with a sliding window on three of every four
layers.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING, attention, decoder, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

SCALING = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@register(
    "cwm",
    reference="CwmForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
    },
)
def cwm(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, theta=1e6, scaling=SCALING)
    feed_forward = mlp(c, bias=c.take_flag("mlp_bias", False))
    blocks = [
        BlockSpec(replace(attn, window=window), feed_forward, norm)
        for window in windows(c, lambda i: SLIDING if i % 4 else FULL)
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "cwm",
    tiny={
        "mlp_bias": True,
        "sliding_window": 7,
        "rope_parameters": {**SCALING, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    },
    variants={"layer_types": {"layer_types": [SLIDING, FULL, SLIDING]}},
    skip={"rope:default": "in the older spelling no scaling means the family's own"},
)
