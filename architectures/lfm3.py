"""LFM3 (Liquid AI, 2026): gated short convolutions, and attention with gated heads, in full or in a sliding
window with its own rotary base; norms before and after each branch.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING, attention, decoder, layer_types, liquid, rope
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    GatedConvSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNormSpec,
)
from liger_models.layers.specs.block import Topology

KINDS = (liquid.CONV, SLIDING, FULL)
PARTIAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
SANDWICH = (
    (".input_layernorm.", ".operator_norm."),
    (".post_attention_layernorm.", ".post_operator_norm."),
    (".pre_feedforward_layernorm.", ".ffn_norm."),
    (".post_feedforward_layernorm.", ".post_ffn_norm."),
)
NORMS = ("pre_feedforward_layernorm", SANDWICH)
NAMES = (*liquid.NAMES, *liquid.EXPERTS, *liquid.PRE_NORM)
"""In layers without norms after the branches the second norm is the MLP's."""


@register(
    "lfm3",
    reference="Lfm3ForCausalLM",
    layouts=(
        Layout((*NAMES, (".g_proj.", ".gate_proj.")), in_layers_with=(NORMS,)),
        Layout(NAMES, in_layers_with=(NORMS,)),
    ),
    defaults={
        **liquid.DEFAULTS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 256,
        "pad_token_id": 124893,
    },
)
def lfm3(c: HFConfig) -> ModelSpec:
    c.take_one_of("norm_eps", "rms_norm_eps", default=None)  # names of one setting
    norm = NormSpec(eps=c.take_number("norm_eps", c.take_number("rms_norm_eps", 1e-5)))
    types = layer_types(c, lambda i: FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else KINDS[0], KINDS)
    window = c.take_count("sliding_window", None)
    if SLIDING in types and window is None:
        raise ConfigError(f"{c.name}: some layers are of type {SLIDING}, but sliding_window is missing")
    full = replace(
        attention(c, bias=c.take_flag("attention_bias", False), layer_type=FULL, theta=1e6, scaling=PARTIAL),
        qk_norm=QKNormSpec(norm),
        gates="heads" if c.take_flag("use_attention_gate", True) else None,
    )
    local = rope(c, full.head_dim, layer_type=SLIDING, local_theta=1e4)
    of_kind: dict[str, AttentionSpec | GatedConvSpec] = {
        liquid.CONV: liquid.gated_conv(c, 7),
        FULL: full,
        SLIDING: replace(full, rope=local, window=window),
    }
    mlp = MLPSpec(c.take_count("intermediate_size"))
    topology: Topology = "sandwich" if c.take_flag("use_sandwich_norm", True) else "pre_norm"
    return decoder(c, [BlockSpec(of_kind[kind], mlp, norm, topology) for kind in types], norm)


# -- tests

OLDER = ("rope_local_base_freq", "rope_scaling", "rope_theta")

for_tests(
    "lfm3",
    tiny={
        **liquid.TINY,
        "layer_types": [liquid.CONV, SLIDING, FULL],
        "attention_bias": True,
        "use_attention_gate": True,
        "use_sandwich_norm": True,
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {**PARTIAL, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    variants={
        "rope left out": {"rope_parameters": ...},
        "five layers": {"num_hidden_layers": 5, "layer_types": ...},
    },
    skip={
        "key:rms_norm_eps": "another name of norm_eps",
        "rope:all": "the reference has the proportional type on full layers",
        **{f"key:{key}": "an older spelling, which the reference does not read" for key in OLDER},
    },
)
