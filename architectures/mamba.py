"""Mamba (Gu and Dao, 2023, arXiv:2312.00752): only layers with a selective scan, no attention and no MLPs."""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import decoder, selective
from liger_models.architectures.common.state_space import fresh_mamba
from liger_models.architectures.mamba2 import NAMES, OF_ATTENTION
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import BlockSpec, Constant, Fresh, ModelSpec, NormSpec, Uniform

KEYS = {
    "state": "state_size",
    "step_rank": "time_step_rank",
    "conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "activation": "hidden_act",
}
STEP_BIAS = (".mamba.dt_bias", ".mamba.dt_proj.bias")
"""The scan adds this bias, not the projection."""

DEFAULTS: dict[str, Any] = {
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
KERNELS = ("use_mambapy", "use_associative_scan")
OF_THE_ORIGINAL = "d_inner d_model fused_add_norm n_layer pad_vocab_size_multiple rms_norm ssm_cfg"
UNREAD = {
    "A_initializer_range": "the reference does not read it",
    **dict.fromkeys(KERNELS, "chooses among kernels with the same results"),
    **dict.fromkeys(OF_THE_ORIGINAL.split(), "of the original implementation; the reference ignores it"),
}


@register(
    "mamba",
    reference="MambaForCausalLM",
    layouts=(Layout((STEP_BIAS, *NAMES), root="backbone."),),
    defaults=DEFAULTS,
    unread=UNREAD,
)
def mamba(c: HFConfig) -> ModelSpec:
    return scans(c)


def scans(c: HFConfig, **settings: Any) -> ModelSpec:
    """A model of these layers; `settings` are other fields of their spec."""
    stream = c.take_flag("residual_in_fp32", True)
    norm = NormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5), float32_stream=stream)
    expanded = c.take_count("expand") * c.take_count("hidden_size")
    mixer = selective(c, c.take_count("intermediate_size", expanded), KEYS, **settings)
    blocks = [BlockSpec(mixer, None, norm, "one_part")] * c.take_count("num_hidden_layers")
    fresh = *fresh_mamba(c, mixer.channels), ("*.mamba.dt_proj.weight", fresh_steps(c, mixer.step_rank))
    return replace(decoder(c, blocks, norm), padding_idx=None, fresh=fresh)


def fresh_steps(c: HFConfig, rank: int) -> Fresh:
    """Initial weights of the projection of the step, of this rank.

    Raises:
        ConfigError: an unknown scheme.
    """
    size = rank**-0.5 * c.take_number("time_step_scale", 1.0)
    scheme = c.take("time_step_init_scheme", "random")
    if scheme not in ("random", "constant"):
        raise ConfigError(
            f"{c.name}: time_step_init_scheme is {abbreviate(scheme)}; expected 'random' or 'constant'"
        )
    return Uniform(size) if scheme == "random" else Constant(size)


# -- tests

TINY = {
    **dict.fromkeys((*OF_ATTENTION, "head_dim"), ...),
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-2,
    "state_size": 5,
    "expand": 2,
    "conv_kernel": 3,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "time_step_rank": 6,
    "time_step_init_scheme": "constant",
    "time_step_scale": 0.5,
    "time_step_min": 0.002,
    "time_step_max": 0.2,
    "time_step_floor": 0.004,
    "tie_word_embeddings": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rank_by_division": {"time_step_rank": "auto"},
    "wider": {"expand": 3},
    "size_given": {"intermediate_size": 72},
}
SKIP = {
    "key:rescale_prenorm_residual": "the reference also divides weights that it has loaded",
    "key:hidden_act": "the convolutions have only SiLU",
    "variant:hidden_act": "the convolutions have only SiLU",
}

for_tests(
    "mamba",
    tiny=TINY,
    variants=VARIANTS,
    skip={**SKIP, "field:SelectiveSpec.norm_eps": "there are no such norms"},
)
