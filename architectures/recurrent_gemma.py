"""RecurrentGemma (Griffin Team, 2024, arXiv:2404.07839): two layers with a real-gated linear recurrence for
each layer of attention in a sliding window; scaled embeddings, soft-capped logits.
"""

from dataclasses import replace

import torch

from liger_models.architectures.common import activation, attention, decoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import BlockSpec, MixerSpec, MLPSpec, ModelSpec, Normal, NormSpec, RGLRUSpec

RECURRENT, LOCAL = "recurrent", "attention"
NAMES = (
    (".rg_lru.conv1d.", ".temporal_block.conv_1d."),
    (".rg_lru.out_proj.", ".temporal_block.linear_out."),
    (".rg_lru.linear_", ".temporal_block.linear_"),
    (".rg_lru.", ".temporal_block.rg_lru."),
    (".self_attn.", ".temporal_block."),
    (".input_layernorm.", ".temporal_pre_norm."),
    (".post_attention_layernorm.", ".channel_pre_norm."),
    (".mlp.", ".mlp_block."),
    ("model.norm.", "model.final_norm."),
)


@register(
    "recurrent_gemma",
    reference="RecurrentGemmaForCausalLM",
    layouts=(Layout(NAMES),),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": 10,
        "attention_window_size": 2048,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    unread={
        "hidden_act": "of older configs; the reference reads hidden_activation",
        "embeddings_scale_by_sqrt_dim": "of older configs; the reference always scales embeddings",
    },
)
def recurrent_gemma(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")
    hidden, layers = c.take_count("hidden_size"), c.take_count("num_hidden_layers")
    act = activation(c, "hidden_activation")
    half = MLPSpec(c.take_count("intermediate_size") // 2, act, bias=True)
    heads, width = c.take_count("num_attention_heads"), c.take_count("lru_width", hidden)
    if width % heads:
        raise ConfigError(f"{c.name}: lru_width {width} is not a multiple of num_attention_heads {heads}")
    window = c.take_count(("attention_window_size", "sliding_window"))
    attends = attention(c, bias=c.take_flag("attention_bias", False), window=window, partial=0.5)
    attends = replace(attends, o_bias=True, dropout=c.take_dropout("attention_dropout"))
    recurs = RGLRUSpec(heads, width // heads, c.take_count("conv1d_width", 4), act)
    of_kind: dict[str, MixerSpec] = {RECURRENT: recurs, LOCAL: attends}
    types = c.take("block_types", [RECURRENT, RECURRENT, LOCAL])
    if not isinstance(types, list) or not types or not all(kind in of_kind for kind in types):
        raise ConfigError(f"{c.name}: block_types has {abbreviate(types)}; expected {' or '.join(of_kind)}")
    blocks = [BlockSpec(of_kind[types[i % len(types)]], half, norm) for i in range(layers)]
    # Of bfloat16 in any dtype, and also of embeddings that a caller passes.
    scale = torch.tensor(hidden**0.5, dtype=torch.bfloat16, device="cpu").item()
    model = decoder(c, blocks, norm, input_scale=scale, logit_softcap=c.take_number("logits_soft_cap", 30.0))
    first, last = c.take_number("w_init_variance_scale", 0.01), 2.0 / layers
    last = c.take_number("final_w_init_variance_scale", last)
    fresh = {
        "*.qkv_proj.weight": 1 / hidden,
        "*.rg_lru.in_proj.weight": 1 / hidden,
        "*.rg_lru.*_gate_weight": first / recurs.head_dim,
        "*.o_proj.weight": last / hidden,
        "*.rg_lru.out_proj.weight": last / width,
    }
    drawn = tuple((pattern, Normal(variance**0.5)) for pattern, variance in fresh.items())
    return replace(model, initializer_range=(first / recurs.conv) ** 0.5, fresh=drawn)


# -- tests

YARN = ("yarn", "yarn_attention_factor", "yarn_mscale", "yarn_fractional")
LONG = ("longrope_short", "longrope_long", "longrope_attention_factor")
OTHER_ROPES = [
    f"rope:{kind}" for kind in ("linear", "dynamic_within", "dynamic_beyond", "llama3", *YARN, *LONG)
]

for_tests(
    "recurrent_gemma",
    tiny={
        "head_dim": ...,
        "hidden_act": ...,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "attention_window_size": 7,
        "block_types": ["recurrent", "attention"],
        "lru_width": 64,
        "conv1d_width": 3,
        "logits_soft_cap": 2.0,
        "w_init_variance_scale": 0.02,
        "final_w_init_variance_scale": 0.5,
        "tie_word_embeddings": True,
    },
    variants={
        "wide heads": {"head_dim": 16},
        "plain": {"attention_bias": False, "hidden_activation": "silu"},
    },
    skip={
        **dict.fromkeys(OTHER_ROPES, "the reference has only the default type"),
        "key:rope_scaling": "the reference has only the default type",
        "key:sliding_window": "another name of attention_window_size",
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "padding:left": "the reference counts padding before a row as its first tokens",
        "positions:given": "the reference resets states at position 0, and not at the start of a document",
    },
)
