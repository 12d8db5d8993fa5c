"""EXAONE 4 (LG AI Research, 2025, arXiv:2507.11407): norms after the branches (post-norm) and QK-norm per
head; if some layers have a sliding window, only those have positions.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "exaone4",
    reference="Exaone4ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
def exaone4(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn, feed_forward = replace(attention(c), qk_norm=QKNormSpec(norm)), mlp(c)
    window, every = c.take_count("sliding_window", None), c.take("sliding_window_pattern", None)

    def usual(layer: int) -> str:
        if window is not None and (type(every) is not int or every < 1):
            raise ConfigError(
                f"{c.name}: without layer_types, sliding_window_pattern must be a whole number of 1 or more, "
                f"found {every!r}; give layer_types"
            )
        return "sliding_attention" if window is not None and (layer + 1) % every else "full_attention"

    blocks = [
        BlockSpec(
            replace(attn, window=slides, rope=attn.rope if slides or window is None else None),
            feed_forward,
            norm,
            topology="post_norm",
        )
        for slides in windows(c, usual)
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "exaone4",
    tiny={"sliding_window": 7, "sliding_window_pattern": 2},
    variants={
        "layer_types": {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window_pattern": "LLG",
        },
        "no_window": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    },
    skip={"swap:model.layers.1.self_attn.q_norm.weight": "without positions only the product of both counts"},
)
