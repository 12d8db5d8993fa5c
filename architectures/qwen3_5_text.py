"""Qwen3.5 (Qwen Team, 2026), dense text models: three layers of linear attention by the gated delta rule for
each layer of gated attention, which applies rotary to a quarter of each head.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import attention, decoder, gated_delta, mixers, mlp, mtp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AttentionSpec, BlockSpec, ModelSpec, NormSpec, QKNormSpec

DEFAULTS = {
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
}
UNREAD = {
    "mamba_ssm_dtype": "states are always float32",
    "mtp_num_hidden_layers": "modules for further tokens are carried along, unless they are asked for",
    "mtp_use_dedicated_embeddings": "modules for further tokens are carried along, unless they are asked for",
}


@register(
    "qwen3_5_text",
    reference="Qwen3_5ForCausalLM",
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    carried=lambda c: ("mtp.*",),
    mtp=mtp.QWEN,
    fixed={"attn_output_gate": True},
    unread=UNREAD,
)
def qwen3_5_text(c: HFConfig) -> ModelSpec:
    norm, feed_forward = centred_norm(c), mlp(c)
    attn = gated_attention(c, norm, text_of_images=True)
    linear = gated_delta(c, "qkv", norm.eps)
    return decoder(c, [BlockSpec(mixer, feed_forward, norm) for mixer in mixers(c, linear, attn)], norm)


def centred_norm(c: HFConfig) -> NormSpec:
    """A norm with zero-centred weight."""
    return NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")


def gated_attention(c: HFConfig, norm: NormSpec, partial: float = 0.25, **rotary: Any) -> AttentionSpec:
    """Gated attention with QK-norm per head. `partial` and `rotary` are options of `rope`."""
    attn = attention(c, bias=c.take_flag("attention_bias", False), partial=partial, **rotary)
    return replace(attn, qk_norm=QKNormSpec(norm), gated=True)


# -- tests

TINY: dict[str, Any] = {
    "rms_norm_eps": 3e-2,  # outputs of heads cross zero, where a norm with a small epsilon jumps
    "attention_bias": True,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

SKIP = {
    "key:hidden_act": "the convolutions of linear attention have only SiLU",
    "variant:hidden_act": "the convolutions of linear attention have only SiLU",
    "refusal:partial_rotary_factor": "a part of each head turns",
}

for_tests(
    "qwen3_5_text",
    tiny=TINY,
    variants={"every_second": {"layer_types": ..., "full_attention_interval": 2}},
    skip={**SKIP, "refusal:mrope": "text has one position on all axes"},
)
