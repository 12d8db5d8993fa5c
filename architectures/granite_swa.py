"""Granite 5 (IBM, 2026): Granite with attention sinks, a sliding window on three of every four layers, and a
rotary base for each layer, or no positions.
"""

from collections.abc import Callable
from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING, by_layer, mlp, windows
from liger_models.architectures.granite import MULTIPLIERS, multiplied
from liger_models.architectures.granite_moe import DEFAULTS, LAYOUTS, SKIP, TINY, experts, with_shared
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AttentionSpec, ModelSpec


@register(
    "granite_swa",
    reference="GraniteSWAForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    },
)
def granite_swa(c: HFConfig) -> ModelSpec:
    return multiplied(c, mlp(c, bias=c.take_flag("mlp_bias", False)), with_sinks(c))


@register(
    "granitemoe_swa",
    reference="GraniteMoeSWAForCausalLM",
    layouts=LAYOUTS[1:],
    defaults={**DEFAULTS, "sliding_window": 128},
)
def granitemoe_swa(c: HFConfig) -> ModelSpec:
    """Granite 5 with experts (IBM, 2026): Granite 5 with experts and a shared one."""
    return multiplied(c, with_shared(c, experts(c)), with_sinks(c))


def with_sinks(c: HFConfig) -> Callable[[AttentionSpec], list[AttentionSpec]]:
    """Attention of each layer, from the common one: sinks, the layer's window, and its rotary base."""

    def mixers(attn: AttentionSpec) -> list[AttentionSpec]:
        assert attn.rope is not None
        bases = by_layer(c, "layer_rope_theta", attn.rope.theta)  # 0: no positions
        return [
            replace(
                attn, sinks=True, window=window, rope=replace(attn.rope, theta=float(base)) if base else None
            )
            for window, base in zip(windows(c, lambda i: SLIDING if i % 4 else FULL), bases, strict=True)
        ]

    return mixers


# -- tests

WINDOWS = {
    "sliding_window": 7,
    "layer_types": [SLIDING, FULL, SLIDING],
    "layer_rope_theta": [0, 500.0, 10000.0],
}

USUAL = {
    "one base": {
        "layer_rope_theta": None,
        "layer_types": None,
        "rope_parameters": ...,
        "rope_theta": 500.0,
    }
}

for_tests(
    "granite_swa",
    tiny={**MULTIPLIERS, **WINDOWS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    variants=USUAL,
)

for_tests(
    "granitemoe_swa",
    tiny={**TINY, **WINDOWS, "shared_intermediate_size": 40},
    variants=USUAL,
    skip=SKIP,
)
