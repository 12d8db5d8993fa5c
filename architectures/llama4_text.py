"""Llama 4, its text part (Meta, 2025): chunked attention, with full attention without positions (NoPE) on
every fourth layer; experts with weighted inputs, and a shared expert.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    CHUNKED,
    FULL,
    INPUTS_FIRST,
    activation,
    attention,
    chunks,
    decoder,
    experts_and_chosen,
    turning_layers,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    QKNormSpec,
    QueryScaleSpec,
)

TEXT = Layout(
    rename=((".mlp.", ".feed_forward."),),
    whole=("*.experts.*",),
    permuted=INPUTS_FIRST,
)
LOSS = ("output_router_logits", "router_aux_loss_coef")


@register(
    "llama4_text",
    reference="Llama4ForCausalLM",
    layouts=(TEXT,),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    unread=dict.fromkeys(LOSS, "the reference adds no such loss"),
)
def llama4_text(c: HFConfig) -> ModelSpec:
    norm, act = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5)), activation(c)
    inner, dense = c.take_count("intermediate_size"), MLPSpec(c.take_count("intermediate_size_mlp"), act)
    sparse = MoESpec(
        *experts_and_chosen(c, ("num_local_experts",)),
        inner,
        act,
        score="sigmoid",
        renormalize=False,
        weighted="inputs",
        shared_expert=MLPSpec(inner, act),
    )
    layers = zip(attentions(c, norm), layers_with_experts(c), strict=True)
    return decoder(c, [BlockSpec(mixer, sparse if has else dense, norm) for mixer, has in layers], norm)


def attentions(c: HFConfig, norm: NormSpec) -> list[AttentionSpec]:
    """Attention of each layer: rotary followed by a norm, or no positions and queries scaled by position."""
    plain = attention(c, bias=c.take_flag("attention_bias", False), interleaved=True, theta=500000.0)
    normed = QKNormSpec(norm, "unweighted", before_rope=False) if c.take_flag("use_qk_norm", False) else None
    growth = QueryScaleSpec(c.take_number("attn_scale"), c.take_count("floor_scale"), first=1)
    grows = c.take("attn_temperature_tuning", False)
    if type(grows) not in (bool, int):  # older configs have a number, and only zero has a meaning
        raise ConfigError(f"{c.name}: attn_temperature_tuning must be true or false, found {grows!r}")
    without_positions = replace(plain, rope=None, query_scale=growth if grows else None)
    turns = turning_layers(c)
    kinds = [replace(plain, qk_norm=normed) if turned else without_positions for turned in turns]
    chunked = c.take("attention_chunk_size", None) is not None
    sizes = chunks(c, lambda i: CHUNKED if turns[i] and chunked else FULL)
    return [replace(kind, chunk=size) for kind, size in zip(kinds, sizes, strict=True)]


def layers_with_experts(c: HFConfig) -> list[bool]:
    """Layers in `moe_layers`; if it is missing, every `interleave_moe_layer_step`-th layer."""
    count, step = c.take_count("num_hidden_layers"), c.take_count("interleave_moe_layer_step", 1)
    listed = c.take_layers("moe_layers", None, among=count)
    return [(i + 1) % step == 0 if listed is None else i in listed for i in range(count)]


# -- tests

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

for_tests(
    "llama4_text",
    tiny={
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 0, 1],
        "use_qk_norm": True,
        "attention_chunk_size": 7,
        "attn_temperature_tuning": True,
        "attn_scale": 0.4,
        "floor_scale": 5,
        "attention_bias": True,
    },
    variants={
        "every second layer": {"moe_layers": None, "interleave_moe_layer_step": 2, "no_rope_layers": []},
        "one expert": {"num_experts_per_tok": 1, "no_rope_layers": None, "no_rope_layer_interval": 2},
        "layer_types": {"layer_types": [FULL, CHUNKED, CHUNKED]},
        "tables scaled": {"use_qk_norm": False, "rope_parameters": {**YARN, "attention_factor": 1.7}},
        "tables scaled by two": {
            "use_qk_norm": False,
            "rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.5},
        },
    },
    skip={
        "field:QKNormSpec.before_rope": "a rotation changes the length of no head",
        "null:attention_chunk_size": "the reference attends to everything only since transformers 5.24",
        "positions:given": "there queries grow by a token's place in its row, padding included",
    },
)
