"""Gemma 4 (Google DeepMind, 2026), its text models: Gemma 3 with wider heads, partial rotary and optionally
keys as values on full-attention layers, norms of values too, and a stored scale after each layer; the small
models have per-layer embeddings and share keys and values among later layers; others have experts in addition
to the MLP.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    check_groups,
    experts_and_chosen,
    gemma,
    layer_sizes,
    local_rope,
    mlp,
    rope,
    share_keys,
    unread_keys,
    windows,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PerLayerInputSpec,
    QKNormSpec,
)

LOCAL: dict[str, Any] = {"layer_type": SLIDING, "local_theta": 1e4}
PARTIAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


NAMES = (
    *((".per_layer_inputs.", "."), (".per_layer_input.", ".")),
    *((".moe.router.weight", ".router.proj.weight"), (".moe.", ".")),
)


@register(
    "gemma4_text",
    reference="Gemma4ForCausalLM",
    layouts=(Layout(NAMES, whole=("*.experts.*",)),),
    carried=unread_keys,
    defaults={
        **gemma.DEFAULTS,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    fixed={"use_bidirectional_attention": "vision"},  # for images
)
def gemma4_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="gemma")
    mixers, inner = share_keys(c, attentions(c, norm)), mlp(c, key="hidden_activation")
    times = 2 if c.take_flag("use_double_wide_mlp", False) else 1
    wide = replace(inner, intermediate_size=inner.intermediate_size * times)
    moe, size = experts(c, norm.eps), c.take_count("hidden_size_per_layer_input", 0, least=0)
    own = PerLayerInputSpec(size, activation(c, "hidden_activation")) if size else None
    c.take("vocab_size_per_layer_input", None)  # also of models without them
    ids = c.take_count("vocab_size_per_layer_input", least=c.take_count("vocab_size")) if own else None
    blocks = [
        BlockSpec(
            mixer,
            inner if isinstance(mixer, AttentionSpec) else wide,
            norm,
            "scaled_sandwich_with_experts" if moe else "scaled_sandwich",
            experts=moe,
            per_layer_input=own,
        )
        for mixer in mixers
    ]
    return gemma.scaled_decoder(c, blocks, norm, per_layer_vocab_size=ids)


def attentions(c: HFConfig, norm: NormSpec) -> list[AttentionSpec]:
    """Attention of each layer; sizes and rotary embedding depend on the layer's type."""
    bias, same = c.take_flag("attention_bias", False), c.take_flag("attention_k_eq_v", False)
    usual = replace(attention(c, bias=bias, **LOCAL), scale=1.0, qk_norm=QKNormSpec(norm, values=True))
    heads = c.take_count("num_global_key_value_heads", usual.num_key_value_heads)
    of_full: dict[str, Any] = {
        "head_dim": c.take_count("global_head_dim", 512),
        "num_key_value_heads": heads if same else usual.num_key_value_heads,
    }
    slides = [*windows(c, lambda i: SLIDING if (i + 1) % 6 else FULL)[:-1], None]  # the last is always full
    sizes = layer_sizes(c, of_full.keys()) or [{} if window else of_full for window in slides]
    mixers = [replace(usual, window=window, **own) for window, own in zip(slides, sizes, strict=True)]
    for i, attn in enumerate(mixers):
        check_groups(c, attn.num_attention_heads, attn.num_key_value_heads)
        if attn.window is None:
            turns = rope(c, attn.head_dim, layer_type=FULL, theta=1e6, scaling=PARTIAL)
        else:
            turns = local_rope(c, attn.head_dim)
        mixers[i] = replace(attn, rope=turns, values_are_keys=same and attn.window is None)
    return mixers


def experts(c: HFConfig, eps: float) -> MoESpec | None:
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        c.take(key, None)  # also of models without them
    if not c.take_flag("enable_moe_block", False):
        return None
    return MoESpec(
        *experts_and_chosen(c, ("num_experts",), ("top_k_experts",)),
        intermediate_size=c.take_count("moe_intermediate_size"),
        activation=activation(c, "hidden_activation"),
        router_norm_eps=eps,
        expert_scale=True,
    )


# -- tests

WIDE = {"head_dim": 20, "num_key_value_heads": 4}

OLDER = ("rope_local_base_freq", "rope_scaling", "rope_theta")

for_tests(
    "gemma4_text",
    tiny={
        **gemma.TINY,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "attention_k_eq_v": True,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 20,
        "rms_norm_eps": 0.3,
        "vocab_size_per_layer_input": 137,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
        "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    variants={
        "dense": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False},
        "keys of the last": {"num_hidden_layers": 5, "layer_types": [SLIDING, *[SLIDING, FULL] * 2]},
        "partial": {
            "rope_parameters": {
                "full_attention": {**PARTIAL, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
        "eps": {"rms_norm_eps": 1.0},
        "rope_left_out": {"rope_parameters": ...},
        "by_layer": {"per_layer_config": {"01": WIDE, "3": WIDE}},
        "every_sixth": {
            "num_hidden_layers": 7,
            "layer_types": ...,
            "head_dim": 8,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    },
    skip={
        "rope:all": "the reference runs the proportional type, and by default on sliding layers",
        **{f"key:{key}": "an older spelling, which the reference does not read" for key in OLDER},
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
