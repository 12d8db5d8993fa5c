"""Granite 4 (IBM, 2025): state space layers, and attention without positions in a few layers; experts with a
shared one, or an MLP.
"""

import math
from dataclasses import replace

from liger_models.architectures.common import FULL, LINEAR, activation, hybrid_types, ssd, time_step_limit
from liger_models.architectures.granite import MULTIPLIERS, multiplied
from liger_models.architectures.granite_moe import DEFAULTS, IN_BLOCKS, ON_DISK, WHOLE, experts, with_shared
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AttentionSpec, MixerSpec, MLPSpec, ModelSpec

DENSE = (
    (".mlp.gate_up_proj.", ".shared_mlp.input_linear."),
    (".mlp.down_proj.", ".shared_mlp.output_linear."),
)
"""Names of the shared expert, in models without others."""

STATES = {
    "hidden_act": "silu",
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""Defaults of the state space layers."""

PACKED = (*WHOLE, "*.mlp.gate_up_proj.*")


@register(
    "granitemoehybrid",
    reference="GraniteMoeHybridForCausalLM",
    layouts=(Layout(DENSE + ON_DISK, PACKED), Layout(DENSE + IN_BLOCKS, PACKED)),
    defaults={
        **DEFAULTS,
        **STATES,
    },
    fixed={"normalization_function": "rmsnorm"},
    unread={
        "mamba_chunk_size": "a setting of the reference's kernel, with the same results",
        "init_method": "concerns only fresh weights",
    },
)
def granitemoehybrid(c: HFConfig) -> ModelSpec:
    def mixers(attn: AttentionSpec) -> list[MixerSpec]:
        size = c.take_count("mamba_expand") * c.take_count("hidden_size")
        mamba = ssd(c, size, c.take_number("rms_norm_eps", 1e-6), **time_step_limit(c))
        if c.take("position_embedding_type", None) != "rope":
            attn = replace(attn, rope=None)
        return [attn if kind == FULL else mamba for kind in hybrid_types(c, lambda i: LINEAR)]

    if c.take_count("num_local_experts", least=0):
        return multiplied(c, with_shared(c, experts(c), 1024), mixers)
    for key in ("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"):
        c.take(key, None)  # of experts
    return multiplied(c, MLPSpec(c.take_count("shared_intermediate_size", 1024), activation(c)), mixers)


# -- tests

TINY_STATES = {
    "mamba_n_heads": 12,
    "mamba_n_groups": 3,
    "mamba_d_state": 10,
    "mamba_d_head": 8,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, math.inf],
}

for_tests(
    "granitemoehybrid",
    tiny={
        "intermediate_size": 32,
        "shared_intermediate_size": 40,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "attention_bias": True,
        **MULTIPLIERS,
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
        "position_embedding_type": "rope",
        **TINY_STATES,
    },
    variants={
        "no_positions": {"position_embedding_type": None},
        "no_experts": {"num_local_experts": 0},
        "older_names": {"layer_types": ..., "layers_block_type": ["mamba", "attention"]},
        "states_alone": {"layer_types": ...},
        "limited_steps": {"time_step_limit": [0.5, 1.2]},
        "heads_by_division": {"mamba_d_head": "auto", "mamba_expand": 3},
    },
    skip={
        "field:MoESpec.softmax_after_top_k": "renormalised shares of all are the same function",
        "field:MoESpec.renormalize": "the same",
        "key:mamba_d_head": "it follows from the number of heads",
        "key:hidden_act": "the convolutions have only SiLU",
        "variant:hidden_act": "the convolutions have only SiLU",
        "null:time_step_limit": "the reference would take its parts",
        **{f"null:{key}": "the reference would multiply by it" for key in MULTIPLIERS},
    },
)
