"""Gemma 3 (Gemma Team, 2025, arXiv:2503.19786), its text models: Gemma 2 with QK-norm instead of soft caps,
and a sliding window with its own rotary base on five of every six layers.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, gemma, local_rope, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "gemma3_text",
    reference="Gemma3ForCausalLM",
    defaults={
        **gemma.DEFAULTS,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
)
def gemma3_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")
    attn = replace(
        attention(c, bias=c.take_flag("attention_bias", False), layer_type="full_attention", theta=1e6),
        scale=c.take_number("query_pre_attn_scalar", positive=True) ** -0.5,
        qk_norm=QKNormSpec(norm),
    )
    local = local_rope(c, attn.head_dim)
    feed_forward = mlp(c, key="hidden_activation")
    every = c.take_count("sliding_window_pattern", 6)
    slides = windows(c, lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    if c.take_flag("use_bidirectional_attention", False):  # in which the window is divided by both sides
        attn = replace(attn, causal=False)
        slides = [None if window is None else window // 2 + 1 for window in slides]
    mixers = [attn if window is None else replace(attn, window=window, rope=local) for window in slides]
    blocks = [BlockSpec(mixer, feed_forward, norm, topology="sandwich") for mixer in mixers]
    return gemma.scaled_decoder(c, blocks, norm)


# -- tests

for_tests(
    "gemma3_text",
    tiny={
        **gemma.TINY,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    variants={
        "bidirectional": {"use_bidirectional_attention": True},
        "layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "every_sixth": {"num_hidden_layers": 6, "sliding_window_pattern": ...},
        "thetas": {"rope_parameters": ..., "rope_theta": 500.0, "rope_local_base_freq": 100.0},
        "own_theta": {"rope_parameters": ..., "rope_theta": 500.0},
    },
    skip={
        "rope:yarn_fractional": "of settings by layer type the reference does not read truncate",
        **{
            f"field:RopeSpec.{name}": "seen without truncation"
            for name in ("truncate", "beta_fast", "beta_slow")
        },
    },
)
