"""OLMo Hybrid (OLMo et al., 2026): linear attention by the gated delta rule, with norms before the branches,
in three of every four layers, and attention with norms after the branches in the others.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, LINEAR, attention, decoder, gated_delta, layer_types, mlp
from liger_models.architectures.common.state_space import step_biases
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LogRates, ModelSpec, NormSpec, QKNormSpec

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
OUTPUTS = ((".linear_attn.norm.", ".linear_attn.o_norm."), (".linear_attn.out_proj.", ".linear_attn.o_proj."))
NORMS = (
    (".input_layernorm.", ".attention_layer_norm."),
    (".post_attention_layernorm.", ".feedforward_layer_norm."),
)
LAYOUTS = (
    Layout(OUTPUTS, in_layers_with=(("linear_attn", NORMS),)),
    Layout(OUTPUTS + NORMS, joined=(Joined(CONVOLUTIONS, CONVOLUTIONS),)),
    Layout(OUTPUTS, joined=(Joined("conv1d", CONVOLUTIONS),)),
)
"""Layouts of the hub, of files written by transformers, and of its modules."""


@register(
    "olmo_hybrid",
    reference="OlmoHybridForCausalLM",
    layouts=LAYOUTS,
    defaults={
        "max_position_embeddings": 65536,
        "pad_token_id": 100277,
        "linear_conv_kernel_dim": 4,
    },
    carried=lambda c: ("mtp.*",),
)
def olmo_hybrid(c: HFConfig) -> ModelSpec:
    norm, feed_forward = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="float32"), mlp(c)
    attn = attention(c, bias=c.take_flag("attention_bias", False), optional=True)
    attn = replace(attn, qk_norm=QKNormSpec(norm, scope="all_heads"))
    heads, width = attn.num_attention_heads, c.take_count("hidden_size")
    keys = c.take_count("linear_num_key_heads", heads)
    key_dim = c.take_count("linear_key_head_dim", int(0.75 * width / keys))
    linear = gated_delta(
        c,
        "apart",
        norm_eps=1e-5,
        sizes=(
            keys,
            c.take_count("linear_num_value_heads", heads),
            key_dim,
            c.take_count("linear_value_head_dim", 2 * key_dim),
        ),
        beta_scale=2.0 if c.take_flag("linear_allow_neg_eigval", True) else 1.0,
    )
    before, after = BlockSpec(linear, feed_forward, norm), BlockSpec(attn, feed_forward, norm, "post_norm")
    last = c.take_count("num_hidden_layers") - 1
    types = layer_types(c, lambda i: FULL if i % 4 == 3 or i == last < 3 else LINEAR, (LINEAR, FULL))
    rates = LogRates(c.take_number("linear_a_log_min", 0.0), c.take_number("linear_a_log_max", 16.0))
    steps = step_biases(c, "linear_dt", "init_floor")
    fresh = (("*.linear_attn.A_log", rates), ("*.linear_attn.dt_bias", steps))
    return decoder(c, [before if kind == LINEAR else after for kind in types], norm, fresh=fresh)


# -- tests

for_tests(
    "olmo_hybrid",
    tiny={
        "rms_norm_eps": 0.5,  # small outputs of heads, whose norm has a small epsilon and jumps at zero
        "attention_bias": True,
        "layer_types": [FULL, LINEAR, FULL],  # two linear layers in training amplify rounding
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "pad_token_id": 7,
        "linear_a_log_min": 0.5,
        "linear_a_log_max": 8.0,
        "linear_dt_min": 0.002,
        "linear_dt_max": 0.2,
        "linear_dt_init_floor": 0.004,
    },
    variants={
        "four_layers": {"num_hidden_layers": 4, "layer_types": ...},
        "no_positions": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        "beta_to_one": {"linear_allow_neg_eigval": False},
    },
    skip={
        "key:hidden_act": "the convolutions of linear attention have only SiLU",
        "variant:hidden_act": "the convolutions of linear attention have only SiLU",
    },
)
