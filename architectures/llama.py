"""LLaMA 1 to 3.3 (Touvron et al., 2023, arXiv:2302.13971; 2307.09288; 2407.21783), text models: the
architecture that most others vary, and many share.
"""

from typing import Any

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "llama",
    reference="LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048},
    carried=lambda c: ("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
def llama(c: HFConfig) -> ModelSpec:
    return of_llamas_layers(c)


def of_llamas_layers(c: HFConfig, **rotary: Any) -> ModelSpec:
    """A model of LLaMA's layers; `rotary` are defaults of the rotary settings, as in `rope`."""
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    block = BlockSpec(
        attention(c, bias=c.take_flag("attention_bias", False), **rotary),
        mlp(c, bias=c.take_flag("mlp_bias", False)),
        norm,
    )
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "llama",
    tiny={
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    variants={"no_bias": {"attention_bias": False, "mlp_bias": False}},
)
