"""Nemotron-4 and Minitron (Parmar et al., 2024, arXiv:2402.16819): LayerNorm with zero-centred weights, a
plain MLP with squared ReLU, and rotary on half of each head.
"""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec


@register(
    "nemotron",
    reference="NemotronForCausalLM",
    defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "initializer_range": 0.0134},
)
def nemotron(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("norm_eps", 1e-5), offset=1.0)
    attn = attention(c, bias=c.take_flag("attention_bias", False), partial=0.5)
    c.take_only(kv_channels=attn.head_dim)
    block = BlockSpec(attn, mlp(c, bias=c.take_flag("mlp_bias", False), gated=False), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "nemotron",
    tiny={
        "rms_norm_eps": ...,
        "norm_eps": 1e-4,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    variants={
        "three_quarters": {"rope_parameters": {"partial_rotary_factor": 0.75}},
        "one_layer": {"num_hidden_layers": 1, "norm_eps": 1e-3},  # squared ReLUs make deep streams large
    },
    skip={
        "key:kv_channels": "another name of head_dim, which the reference does not read",
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "rounding:norms": "the reference rounds 1 + weight to the model's dtype, and we do not",
    },
)
