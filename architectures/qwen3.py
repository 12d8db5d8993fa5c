"""Qwen3 (Yang et al., 2025, arXiv:2505.09388), dense: QK-norm per head before the rotary embedding and no
biases.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.qwen2 import upper_windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AttentionSpec, BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "qwen3",
    reference="Qwen3ForCausalLM",
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
)
def qwen3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn, feed_forward = normed_attention(c, norm), mlp(c)
    blocks = [BlockSpec(replace(attn, window=w), feed_forward, norm) for w in upper_windows(c)]
    return decoder(c, blocks, norm)


def normed_attention(c: HFConfig, norm: NormSpec) -> AttentionSpec:
    """Attention with a norm of each head's query and key."""
    return replace(attention(c, bias=c.take_flag("attention_bias", False)), qk_norm=QKNormSpec(norm))


# -- tests

for_tests(
    "qwen3",
    tiny={"attention_bias": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    variants={"layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}},
)
