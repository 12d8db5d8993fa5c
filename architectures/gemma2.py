"""Gemma 2 (Riviere et al., 2024, arXiv:2408.00118): norms before and after each branch, with zero-centred
weights; soft-capped scores and logits; a sliding window on every other layer; scaled embeddings tied to the
head.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import attention, gemma, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, Topology

DEFAULTS = {
    **gemma.DEFAULTS,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "layer_types": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "one_layer": {"num_hidden_layers": 1, "final_logit_softcapping": None, "rms_norm_eps": 1e-4},
}


@register(
    "gemma2",
    reference="Gemma2ForCausalLM",
    defaults=DEFAULTS,
    unread={
        "hidden_act": "of older configs; the reference reads hidden_activation",
        "sliding_window_size": "of older configs; the reference reads sliding_window",
    },
)
def gemma2(c: HFConfig) -> ModelSpec:
    return capped(c, "sandwich")


def capped(c: HFConfig, topology: Topology) -> ModelSpec:
    """Gemma 2, with its norms placed as given."""
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")
    attn = replace(
        attention(c, bias=c.take_flag("attention_bias", False)),
        scale=c.take_number("query_pre_attn_scalar", positive=True) ** -0.5,
        softcap=c.take_number("attn_logit_softcapping", None),
    )
    feed_forward = mlp(c, key="hidden_activation")
    slides = windows(c, lambda i: "full_attention" if i % 2 else "sliding_attention")
    blocks = [BlockSpec(replace(attn, window=w), feed_forward, norm, topology) for w in slides]
    return gemma.scaled_decoder(c, blocks, norm)


# -- tests

TINY = {**gemma.TINY, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}

for_tests("gemma2", tiny=TINY, variants=VARIANTS)
