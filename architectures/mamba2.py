"""Mamba 2 (Dao and Gu, 2024): only state space layers, no attention and no MLPs; Codestral Mamba."""

import math
from dataclasses import replace

from liger_models.architectures.common import decoder, ssd, time_step_limit
from liger_models.architectures.common.state_space import fresh_mamba
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

KEYS = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "activation": "hidden_act",
}
NAMES = ((".embed_tokens.", ".embeddings."), ("backbone.norm.", "backbone.norm_f."), (".mamba.", ".mixer."))

INITIALISATION = (
    "A_initializer_range",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "time_step_scale",
)
READ = ("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min")
NOT_READ = tuple(key for key in INITIALISATION if key not in READ)


@register(
    "mamba2",
    reference="Mamba2ForCausalLM",
    layouts=(Layout(NAMES, root="backbone."),),
    defaults={
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "initializer_range": 0.1,
    },
    unread={
        **dict.fromkeys(NOT_READ, "the reference does not read it"),
        "chunk_size": "a setting of the reference's kernel, with the same results",
        "intermediate_size": "it is expand * hidden_size",
        "norm_before_gate": "the reference multiplies by the gate first, whatever it says",
        "rms_norm": "the reference always has the norm",
    },
)
def mamba2(c: HFConfig) -> ModelSpec:
    stream = c.take_flag("residual_in_fp32", True)
    norm = NormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5), float32_stream=stream)
    size = c.take_count("expand") * c.take_count("hidden_size")
    mixer = ssd(c, size, norm.eps, KEYS, **time_step_limit(c))
    blocks = [BlockSpec(mixer, None, norm, "one_part")] * c.take_count("num_hidden_layers")
    return replace(decoder(c, blocks, norm), padding_idx=None, fresh=fresh_mamba(c, size))


# -- tests

OF_ATTENTION = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)

for_tests(
    "mamba2",
    tiny={
        **dict.fromkeys(OF_ATTENTION, ...),
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-2,
        "num_heads": 12,
        "head_dim": 8,
        "n_groups": 3,
        "state_size": 10,
        "expand": 2,
        "conv_kernel": 3,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": True,
        "time_step_limit": [0.0, math.inf],
        "time_step_min": 0.002,
        "time_step_max": 0.2,
        "time_step_floor": 0.004,
    },
    variants={
        "limited_steps": {"time_step_limit": [0.5, 1.2]},
        "wider": {"expand": 3, "num_heads": 18},
    },
    skip={
        "key:rescale_prenorm_residual": "the reference also divides weights that it has loaded",
        "key:hidden_act": "the convolutions have only SiLU",
        "variant:hidden_act": "the convolutions have only SiLU",
        "variant:head_dim_apart": "heads have expand * hidden_size channels",
    },
)
