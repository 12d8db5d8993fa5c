"""GLM-4-9B (GLM team, 2024, arXiv:2406.12793): interleaved rotary on half of each head, biases on queries,
keys and values, and checkpoints that pack gate and up as we do. The 2025 models, `glm4`, also have a norm
after each branch.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, Topology

PACKED = ("*.gate_up_proj.*",)
GLM4 = Layout(
    rename=(
        (".post_attention_layernorm.", ".post_self_attn_layernorm."),
        (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
        (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
    ),
    whole=PACKED,
)
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "pad_token_id": 151329,
}


@register("glm", reference="GlmForCausalLM", layouts=(Layout(whole=PACKED),), defaults=DEFAULTS)
def glm(c: HFConfig) -> ModelSpec:
    return model(c, "pre_norm")


@register(
    "glm4",
    reference="Glm4ForCausalLM",
    layouts=(GLM4,),
    defaults=DEFAULTS,
)
def glm4(c: HFConfig) -> ModelSpec:
    """GLM-4-0414 (GLM team, 2025): GLM-4-9B with a norm after each branch as well."""
    return model(c, "sandwich")


def model(c: HFConfig, topology: Topology) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1.5625e-7))
    attn = attention(c, partial=0.5, interleaved=True)
    attn = replace(attn, qkv_bias=c.take_flag("attention_bias", True))
    block = BlockSpec(attn, mlp(c), norm, topology=topology)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for family in ("glm", "glm4"):
    for_tests(
        family,
        tiny={
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "pad_token_id": 0,
        },
        variants={"three_quarters": {"rope_parameters": {"partial_rotary_factor": 0.75}}},
        skip={"refusal:partial_rotary_factor": "a part of a head may turn"},
    )
