"""The language model of North Micro Vision (Cohere, 2026): Command R7B's parallel blocks, with separate
rotary settings, or none, for each type of layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    attention_as_wide_as_the_model,
    decoder,
    mlp,
    rope,
    windows,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, RopeSpec


@register(
    "cohere_compass_text",
    reference="CohereCompassForCausalLM",
    defaults={
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    fixed={"pooling": None},  # of classifiers
    unread={  # next to the settings by layer type in released files
        f"rope_parameters.{key}": "the reference drops it" for key in ("rope_theta", "rope_type")
    },
)
def cohere_compass_text(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5), bias=False)
    bias, feed_forward = c.take_flag("attention_bias", False), mlp(c)
    attn = attention_as_wide_as_the_model(c, bias=bias, positions=False)
    spans = windows(c, lambda i: FULL)
    ropes = {bool(window): rotary(c, attn.head_dim, SLIDING if window else FULL) for window in spans}
    blocks = [
        BlockSpec(replace(attn, window=window, rope=ropes[bool(window)]), feed_forward, norm, "parallel")
        for window in spans
    ]
    return decoder(c, blocks, norm, logit_scale=c.take_number("logit_scale", 1.0))


def rotary(c: HFConfig, head_dim: int, layer_type: str) -> RopeSpec | None:
    """Rotary settings of a type of layers; None where the config has a null for it. There is no default."""
    settings = c.take("rope_parameters", c.take("rope_theta", None))
    if settings is None:
        c.take("rope_parameters")
    if isinstance(settings, Mapping) and settings.get(layer_type, settings) is None:
        return None
    return rope(c, head_dim, layer_type=layer_type, text_of_images=True)


# -- tests

TINY: dict[str, Any] = {
    "rms_norm_eps": ...,
    "layer_norm_eps": 1e-4,
    "head_dim": ...,
    "logit_scale": 0.3,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "sliding_window": 7,
    "layer_types": [SLIDING, FULL, SLIDING],
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 5e4},
        SLIDING: {"rope_type": "default", "rope_theta": 500.0},
    },
}

for_tests(
    "cohere_compass_text",
    tiny=TINY,
    variants={
        "full layers without positions": {
            "rope_parameters": {
                FULL: None,
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    },
    skip={
        "rope:all": "the reference reads only settings by layer type",
        **{f"key:{key}": "the same" for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")},
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
        "refusal:mrope": "text has the same position on all axes",
        "null:layer_norm_eps": "the reference cannot run with it",
        "published:config": "no copy was at hand",
    },
)
