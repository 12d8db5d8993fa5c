"""OLMo 3 (OLMo et al., 2025): OLMo 2 with a sliding window on three of every four layers; only the other
layers scale the rotary embedding for long contexts.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, rope, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec

THETA = 500000.0


@register(
    "olmo3",
    reference="Olmo3ForCausalLM",
    defaults={"max_position_embeddings": 2048, "sliding_window": 4096, "pad_token_id": 1},
)
def olmo3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5), cast="float32")
    full = attention(c, bias=c.take_flag("attention_bias", False), layer_type="full_attention", theta=THETA)
    full = replace(full, qk_norm=QKNormSpec(norm, scope="all_heads"))
    sliding = replace(full, rope=rope(c, full.head_dim, layer_type="sliding_attention", theta=THETA))
    feed_forward = mlp(c)
    blocks = [
        BlockSpec(replace(sliding, window=w) if w else full, feed_forward, norm, topology="post_norm")
        for w in windows(c, lambda i: "sliding_attention" if (i + 1) % 4 else "full_attention")
    ]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "olmo3",
    tiny={
        "attention_bias": False,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
        },
    },
    variants={
        "four_layers": {"num_hidden_layers": 4, "layer_types": ...},
        "one_layer": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "rms_norm_eps": 1e-4},
    },
    skip={
        "rope:dynamic_beyond": "layers with a window do not stretch",
        "rope:yarn_fractional": "of settings by layer type the reference does not read truncate",
        **{
            f"field:RopeSpec.{name}": "seen without truncation"
            for name in ("truncate", "beta_fast", "beta_slow")
        },
        "field:RopeSpec.max_position_embeddings": "read only by dynamic rotation beyond it",
    },
)
