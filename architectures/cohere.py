"""Command R and R+ (Cohere, 2024): attention and MLP in parallel after one LayerNorm, interleaved rotary,
scaled logits; in R+ a LayerNorm of each head's query and key.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, QKNormSpec

DEFAULTS = {
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}


@register(
    "cohere",
    reference="CohereForCausalLM",
    layouts=(Layout(whole=("*.q_norm.*", "*.k_norm.*")),),
    defaults=DEFAULTS,
)
def cohere(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5), bias=False)
    attn = attention(c, bias=c.take_flag("attention_bias", False), interleaved=True, theta=500000.0)
    if c.take_flag("use_qk_norm", False):
        attn = replace(attn, qk_norm=QKNormSpec(norm, scope="own_head"))
    block = BlockSpec(attn, mlp(c), norm, topology="parallel")
    blocks = [block] * c.take_count("num_hidden_layers")
    return decoder(c, blocks, norm, logit_scale=c.take_number("logit_scale"))


# Config keys whose meaning is fixed in the reference.
GRANTED = (
    *("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "use_embedding_sharing"),
    *("use_gated_activation", "use_parallel_block", "use_parallel_embedding"),
)


@register(
    "cohere2",
    reference="Cohere2ForCausalLM",
    defaults={**DEFAULTS, "sliding_window": 4096},
    unread=dict.fromkeys(GRANTED, "the reference does not read it"),
    fixed={"rotary_pct": 1.0},  # not read by the reference
)
def cohere2(c: HFConfig) -> ModelSpec:
    """Command R7B and A (Cohere, 2024): Command R with a sliding window on three of every four layers, and no
    positions (NoPE) on the fourth.
    """
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5), bias=False)
    attn = attention(c, bias=c.take_flag("attention_bias", False), interleaved=True)
    feed_forward, every = mlp(c), c.take_count("sliding_window_pattern", 4)
    blocks = [
        BlockSpec(replace(attn, window=w, rope=attn.rope if w else None), feed_forward, norm, "parallel")
        for w in windows(c, lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    ]
    return decoder(c, blocks, norm, logit_scale=c.take_number("logit_scale"))


# -- tests

TINY = {
    "rms_norm_eps": ...,
    "layer_norm_eps": 1e-4,
    "logit_scale": 0.3,
    "attention_bias": True,
    "tie_word_embeddings": True,
}

SKIP = {"null:layer_norm_eps": "the reference cannot run with it"}

for_tests("cohere", tiny={**TINY, "use_qk_norm": True}, skip=SKIP)

for_tests(
    "cohere2",
    tiny={**TINY, "sliding_window": 7, "sliding_window_pattern": 2},
    variants={"layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}},
    skip=SKIP,
)
