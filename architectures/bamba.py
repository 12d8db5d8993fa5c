"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba 2's state space layers, attention in a few layers, and an
MLP in each.
"""

from liger_models.architectures.common import attention, decoder, mlp, ssd, time_step_limit
from liger_models.architectures.granite_moe_hybrid import STATES, TINY_STATES
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

NAMES = (
    (".post_attention_layernorm.", ".pre_ff_layernorm."),
    ("model.norm.", "model.final_layernorm."),
    (".mlp.", ".feed_forward."),
)
"""Of the norm before the MLP, the last norm and the MLP."""


@register(
    "bamba",
    reference="BambaForCausalLM",
    layouts=(Layout(NAMES),),
    defaults={**STATES, "pad_token_id": 0, "num_key_value_heads": 8, "max_position_embeddings": 262144},
    fixed={"z_loss_coefficient": 0.0},
    unread={
        "mamba_chunk_size": "a setting of the reference's kernel, with the same results",
        "num_logits_to_keep": "a setting of generation",
    },
)
def bamba(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    c.take_only(partial_rotary_factor=0.5)  # the reference reads another only in rope_parameters
    attn = attention(c, bias=c.take_flag("attention_bias", False), partial=0.5)
    feed_forward = mlp(c, bias=c.take_flag("mlp_bias", False))
    size = c.take_count("mamba_expand") * c.take_count("hidden_size")
    mamba = ssd(c, size, norm.eps, **time_step_limit(c))
    count = c.take_count("num_hidden_layers")
    attending = c.take_layers("attn_layer_indices", [])
    blocks = [BlockSpec(attn if i in attending else mamba, feed_forward, norm) for i in range(count)]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "bamba",
    tiny={
        **TINY_STATES,
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    variants={
        "states_alone": {"attn_layer_indices": None},
        "limited_steps": {"time_step_limit": [0.5, 1.2]},
        "heads_by_division": {"mamba_d_head": "auto", "mamba_expand": 3},
    },
    skip={
        "key:mamba_d_head": "it follows from the number of heads",
        "key:hidden_act": "the convolutions have only SiLU",
        "variant:hidden_act": "the convolutions have only SiLU",
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "null:time_step_limit": "the reference would take its parts",
    },
)
