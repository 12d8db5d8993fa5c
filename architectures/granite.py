"""Granite 3 (IBM, 2024): LLaMA with multipliers for embeddings, scores and branches, and logits divided by a
constant.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
)


@register("granite", reference="GraniteForCausalLM", defaults={"max_position_embeddings": 2048})
def granite(c: HFConfig) -> ModelSpec:
    return multiplied(c, mlp(c, bias=c.take_flag("mlp_bias", False)))


def multiplied(
    c: HFConfig,
    feed_forward: MLPSpec | MoESpec,
    mixers: Callable[[AttentionSpec], Sequence[MixerSpec]] | None = None,
) -> ModelSpec:
    """A model with Granite's multipliers.

    Args:
        feed_forward: of every layer, after its mixer.
        mixers: of the layers, from their attention. Default: attention in each.
    """
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = replace(
        attention(c, bias=c.take_flag("attention_bias", False)),
        scale=c.take_number("attention_multiplier", 1.0, positive=True),
        dropout=c.take_dropout("attention_dropout"),
    )
    divisor = c.take_number("logits_scaling", 1.0, positive=True)
    scale = c.take_number("residual_multiplier", 1.0)
    kinds = mixers(attn) if mixers else [attn] * c.take_count("num_hidden_layers")
    return decoder(
        c,
        [BlockSpec(mixer, feed_forward, norm, residual_scale=scale) for mixer in kinds],
        norm,
        input_scale=c.take_number("embedding_multiplier", 1.0),
        logit_scale=1 / divisor,
    )


# -- tests

MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
}
"""For tests."""

for_tests("granite", tiny={**MULTIPLIERS, "attention_bias": True, "mlp_bias": True})
