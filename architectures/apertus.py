"""Apertus (Swiss AI, 2025, arXiv:2509.14233): LLaMA with a plain MLP of xIELU with learned slopes, and
QK-norm per head.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec

NAMES = (
    (".input_layernorm.", ".attention_layernorm."),
    (".post_attention_layernorm.", ".feedforward_layernorm."),
)
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@register(
    "apertus",
    reference="ApertusForCausalLM",
    layouts=(Layout(rename=NAMES),),
    defaults={"hidden_act": "xielu", "max_position_embeddings": 65536, "pad_token_id": 3},
)
def apertus(c: HFConfig) -> ModelSpec:
    if not c.take_flag("qk_norm", True):
        raise ConfigError(f"{c.name}: qk_norm is false, but apertus models norm queries and keys; remove it")
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, bias=c.take_flag("attention_bias", False), theta=12000000.0, scaling=SCALING)
    attn = replace(attn, qk_norm=QKNormSpec(norm))
    block = BlockSpec(attn, mlp(c, gated=False), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "apertus",
    tiny={
        "hidden_act": "xielu",
        "attention_bias": True,
        "pad_token_id": 3,
        "rope_parameters": {**SCALING, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    },
    skip={
        "rope:default": "in the older spelling no scaling means the family's own",
        "key:qk_norm": "models without are refused",
        **{f"swap:model.layers.{i}.mlp.act_fn.eps": "all next to zero" for i in range(2)},
    },
)
