"""Phi-3.5-MoE (Microsoft, 2024, arXiv:2404.14219): Mixtral with LayerNorms, biases, longrope, and two experts
per token, sampled in training (SparseMixer-v2).
"""

from dataclasses import replace

from liger_models.architectures.common import attention, chosen_experts, decoder, longrope_alone
from liger_models.architectures.mixtral import IN_BLOCKS
from liger_models.architectures.phi3 import REFUSED, UNREAD, longrope_factors
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, ModelSpec, SparseMixerSpec

MSCALES = ("short_mscale", "long_mscale")


@register(
    "phimoe",
    reference="PhimoeForCausalLM",
    layouts=(Layout(IN_BLOCKS), Layout(whole=("*.experts.*",))),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.01,
    },
    fixed={"num_experts_per_tok": 2},
)
def phimoe(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    draws = {
        "sparse_mixer": SparseMixerSpec(c.take_number("router_jitter_noise")),
        "input_noise": c.take_number("input_jitter_noise", 0.0),
    }
    moe = chosen_experts(c, ("num_local_experts",), size="intermediate_size", **draws)
    blocks = [BlockSpec(_attention(c), moe, norm)] * c.take_count("num_hidden_layers")
    return decoder(c, blocks, norm, head_bias=c.take_flag("lm_head_bias", False))


def _attention(c: HFConfig) -> AttentionSpec:
    """Attention whose longrope takes the factors of cosines and sines from the config, for short and long
    texts.
    """
    bias, window = c.take_flag("attention_bias", False), c.take_count("sliding_window", None)
    attn = attention(c, bias=bias, window=window, theta=1e6, extra=MSCALES)
    turned = longrope_alone(c, attn.rope)
    if turned.type == "default":
        return attn
    scales = c.take_rope(default_theta=1e6, extra=MSCALES)["extra"]
    short, long = (scales.get(key) for key in MSCALES)
    if short is None or short != long:
        raise ConfigError(f"{c.name}: longrope needs equal {' and '.join(MSCALES)}, found {short} and {long}")
    return replace(attn, rope=replace(turned, attention_factor=float(short)))


# -- tests

LONGROPE = {**longrope_factors(8), **dict.fromkeys(MSCALES, 1.2), "original_max_position_embeddings": 64}

BEYOND = "transformers takes the short factors at every length: tests/architectures/test_phimoe.py"

for_tests(
    "phimoe",
    tiny={
        "hidden_size": 64,
        "head_dim": ...,
        "num_local_experts": 7,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.8,
        "input_jitter_noise": 0.1,
        "sliding_window": 7,
        "attention_bias": True,
        "lm_head_bias": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **LONGROPE},
    },
    variants={
        "head_dim": {"head_dim": 24, "rope_parameters": {"rope_type": "default"}},
        "older_spelling": {
            "rope_parameters": ...,
            "rope_theta": 100.0,
            "rope_scaling": {**LONGROPE, "type": "longrope"},
            "original_max_position_embeddings": 64,
        },
    },
    skip={
        **{f"rope:{kind}": f"the reference needs a {MSCALES[0]}" for kind in (*REFUSED, "longrope")},
        **{f"field:RopeSpec.{name}": "longrope does not read it" for name in (*UNREAD, "factor")},
        **{f"field:RopeSpec.{name}": BEYOND for name in ("long_factor", "original_max_position_embeddings")},
    },
)
