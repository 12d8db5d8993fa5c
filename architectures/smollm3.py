"""SmolLM3 (Hugging Face, 2025): LLaMA in which every fourth layer has no positions (NoPE)."""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, turning_layers, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "smollm3",
    reference="SmolLM3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "pad_token_id": 128004,
        "tie_word_embeddings": True,
    },
    unread={
        "max_window_layers": "of other models; the reference does not read it",
        "pretraining_tp": "the reference does not read it",
    },
)
def smollm3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = attention(c, bias=c.take_flag("attention_bias", False), theta=2000000.0)
    feed_forward, turns = mlp(c, bias=c.take_flag("mlp_bias", False)), turning_layers(c)
    slides = c.take_flag("use_sliding_window", False) and c.take_count("sliding_window", None) is not None
    types = ["sliding_attention" if slides and not turned else "full_attention" for turned in turns]
    blocks = [
        BlockSpec(replace(attn, window=window, rope=attn.rope if turned else None), feed_forward, norm)
        for window, turned in zip(windows(c, types.__getitem__, off=not slides), turns, strict=True)
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "smollm3",
    tiny={
        "attention_bias": True,
        "mlp_bias": True,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    variants={
        "no_rope_layers": {"no_rope_layers": [0, 1, 1]},
        "layer_types": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    },
)
