"""Falcon-H1 (TII, 2025, arXiv:2507.22448): attention and state space layers in parallel, and multipliers for
embeddings, keys, projections, branches and logits.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.bamba import NAMES
from liger_models.architectures.common import attention, decoder, mlp, ssd, time_step_limit
from liger_models.architectures.granite_moe_hybrid import STATES, TINY_STATES
from liger_models.architectures.mamba2 import INITIALISATION
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

NOT_READ = "mamba_chunk_size", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep"


@register(
    "falcon_h1",
    reference="FalconH1ForCausalLM",
    layouts=(Layout(NAMES),),
    defaults={
        **STATES,
        "pad_token_id": 0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
    },
    unread=dict.fromkeys((*INITIALISATION, *NOT_READ), "the results are the same, or it is not read"),
)
def falcon_h1(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    bias = c.take_flag("attention_bias", False)
    attn, read = attention(c, bias=bias), factor(c, "attention_in_multiplier", bias, "attention_bias")
    attn = replace(attn, scale=attn.scale * factor(c, "key_multiplier") * read**2)
    expanded = c.take_count("mamba_expand") * c.take_count("hidden_size")
    into = factor(c, "ssm_in_multiplier", c.take_flag("mamba_proj_bias", False), "mamba_proj_bias")
    gating = "after_norm" if c.take_flag("mamba_norm_before_gate", False) else "before_norm"
    mamba = ssd(
        c,
        c.take_count("mamba_d_ssm", expanded),
        norm.eps,
        out_bias=c.take_flag("projectors_bias", False),
        gating=gating if c.take_flag("mamba_rms_norm", False) else "without_norm",
        norm_cast="float32",
        scales=tuple(into * scale for scale in factors(c, "ssm_multipliers", 5)),
        **time_step_limit(c),
    )
    gate, down = factors(c, "mlp_multipliers", 2)
    inner = replace(mlp(c, bias=c.take_flag("mlp_bias", False)), gate_scale=gate)
    scales = read * factor(c, "attention_out_multiplier"), factor(c, "ssm_out_multiplier"), down
    block = BlockSpec(attn, inner, norm, "side_by_side", second_mixer=mamba, branch_scales=scales)
    blocks = [block] * c.take_count("num_hidden_layers")
    edges = {"embed_scale": factor(c, "embedding_multiplier"), "logit_scale": factor(c, "lm_head_multiplier")}
    return decoder(c, blocks, norm, round_embed_scale=False, **edges)


def factor(c: HFConfig, key: str, bias: bool = False, bias_key: str = "") -> Any:
    """A multiplier; one of a layer's input multiplies its output instead, and so excludes a bias."""
    value = c.take_number(key, 1.0, positive=True)
    if bias and value != 1.0:
        raise ConfigError(f"{c.name}: {key} is {value} and {bias_key} true, which are not supported together")
    return value


def factors(c: HFConfig, key: str, count: int) -> list[float]:
    values = c.take(key, [1.0] * count)
    if not isinstance(values, list) or len(values) != count or not all(is_finite(x) for x in values):
        raise ConfigError(f"{c.name}: {key} must be {count} numbers, found {abbreviate(values)}")
    return values


# -- tests

MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.6,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    "mlp_multipliers": [1.4, 0.6],
}

for_tests(
    "falcon_h1",
    tiny={
        **TINY_STATES,
        **MULTIPLIERS,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 96,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "attention_bias": False,
        "projectors_bias": True,
        "mlp_bias": True,
        "pad_token_id": 7,
    },
    variants={
        "norm": {"mamba_rms_norm": True, "rms_norm_eps": 0.1},
        "norm_after_gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "rms_norm_eps": 0.1},
        "biases": {
            "attention_bias": True,
            "mamba_proj_bias": True,
            "attention_in_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
        },
        "expanded": {"mamba_d_ssm": None},
        "limited_steps": {"time_step_limit": [0.3, 0.8]},
    },
    skip={
        "key:mamba_d_head": "it follows from the number of heads",
        "key:mamba_expand": "mamba_d_ssm goes before it",
        "key:hidden_act": "the convolutions have only SiLU",
        "variant:hidden_act": "the convolutions have only SiLU",
        "variant:attention_bias=True": "not with attention_in_multiplier",
        "variant:mamba_proj_bias=True": "not with ssm_in_multiplier",
        "null:time_step_limit": "the reference would take its parts",
        **{f"null:{key}": "the reference would multiply by it" for key in MULTIPLIERS if key.endswith("er")},
    },
)
