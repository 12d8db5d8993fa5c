"""Gemma 4, its dense text models (Google DeepMind, 2026): as Gemma 3 with wider heads on layers of full
attention, whose values are their keys, norms of values too, rotations of a part of those heads' pairs, and a
stored factor behind each layer. Inputs for each layer, layers that share keys and values, and experts are not
supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import attention, check_groups, decoder, mlp, rope, windows
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.spec import AttentionSpec, BlockSpec, ModelSpec, NormSpec, QKNormSpec

LOCAL: dict[str, Any] = {"local_theta": 1e4}
PARTIAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}

OTHER_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
OTHER_FIELDS = (
    *("factor", "max_position_embeddings", "original_max_position_embeddings", "attention_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor"),
)
ASIDE = (
    *("use_bidirectional_attention", "num_kv_shared_layers", "enable_moe_block", "use_double_wide_mlp"),
    *("vocab_size_per_layer_input", "rope_local_base_freq", "rope_scaling", "rope_theta"),
)


@register(
    "gemma4_text",
    reference="Gemma4ForCausalLM",
    tiny={
        "hidden_act": ...,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": True,
        "attention_k_eq_v": True,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 2.0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    variants={
        "layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "partial": {
            "rope_parameters": {
                "full_attention": {**PARTIAL, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
        "rope_left_out": {"rope_parameters": ...},
        "by_layer": {"per_layer_config": {"02": {"head_dim": 32, "num_key_value_heads": 4}}},
        "every_sixth": {"num_hidden_layers": 7, "head_dim": 8, "global_head_dim": 8},
    },
    skip={
        "published:config": "none is known here for certain",
        **{f"rope:{kind}": "the reference cannot run it" for kind in OTHER_ROPES},
        **{f"field:RopeSpec.{name}": "of those rope types" for name in OTHER_FIELDS},
        **{f"key:{key}": "of what is refused, or of no effect" for key in ASIDE},
    },
)
def gemma4_text(c: HFConfig) -> ModelSpec:
    _refuse_what_is_missing(c)
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="gemma")
    layers, feed_forward = c.take_count("num_hidden_layers"), mlp(c, key="hidden_activation")
    slides = windows(c, lambda i: "sliding_attention" if (i + 1) % 6 and i + 1 < layers else "full_attention")
    if slides[-1] is not None:
        raise ConfigError(f"{c.name}: the last of layer_types must be full_attention")
    attn = replace(
        attention(c, bias=c.take_flag("attention_bias", False), layer_type="sliding_attention", **LOCAL),
        scale=1.0,
        qk_norm=QKNormSpec(norm, values=True),
    )
    mixers = [_mixer(c, i, window, attn) for i, window in enumerate(slides)]
    return decoder(
        c,
        [BlockSpec(mixer, feed_forward, norm, topology="scaled_sandwich") for mixer in mixers],
        norm,
        embed_scale=c.take_count("hidden_size") ** 0.5,
        logit_softcap=c.take_number("final_logit_softcapping", None),
    )


def _mixer(c: HFConfig, layer: int, window: int | None, attn: AttentionSpec) -> AttentionSpec:
    """Attention of one layer, whose sizes and rotation differ by its type."""
    full, shared = window is None, c.take_flag("attention_k_eq_v", False)
    attn = replace(attn, window=window, **_of_layer(c, layer, full, shared))
    check_groups(c, attn.num_attention_heads, attn.num_key_value_heads)
    if full:
        turns = rope(c, attn.head_dim, layer_type="full_attention", theta=1e6, scaling=PARTIAL)
        return replace(attn, rope=turns, values_are_keys=shared)
    turns = rope(c, attn.head_dim, layer_type="sliding_attention", **LOCAL)
    return replace(attn, rope=replace(turns, max_position_embeddings=None))  # no distance is longer


def _of_layer(c: HFConfig, layer: int, full: bool, shared: bool) -> dict[str, Any]:
    """What a layer has in place of the model's own sizes: by `per_layer_config`, or by its type."""
    head_dim, heads = c.take_count("global_head_dim", 512), c.take_count("num_global_key_value_heads", None)
    stated = c.take("per_layer_config", None)
    if stated is None:
        own = {"head_dim": head_dim, "num_key_value_heads": heads if shared else None}
        return {key: size for key, size in own.items() if size is not None} if full else {}
    known, count = {"head_dim", "num_key_value_heads"}, c.take_count("num_hidden_layers")
    if not isinstance(stated, dict) or not all(
        str(key).isdecimal()
        and int(key) < count  # "05" too
        and isinstance(sizes, dict)
        and sizes.keys() <= known
        and all(type(size) is int and size > 0 for size in sizes.values())
        for key, sizes in stated.items()
    ):
        raise ConfigError(
            f"{c.name}: per_layer_config must give some of the {count} layers, by their numbers, whole "
            f"numbers for head_dim and num_key_value_heads, found {abbreviate(stated)}"
        )
    return {int(key): sizes for key, sizes in stated.items()}.get(layer, {})


def _refuse_what_is_missing(c: HFConfig) -> None:
    """
    Raises:
        ConfigError: the model has parts that are not here.
    """
    for key in ("vocab_size_per_layer_input", "use_double_wide_mlp"):  # of those parts alone
        c.take(key, None)
    refused = {
        "hidden_size_per_layer_input": c.take("hidden_size_per_layer_input", 0),
        "num_kv_shared_layers": c.take("num_kv_shared_layers", 0),
        "enable_moe_block": c.take("enable_moe_block", False),
    }
    for key, value in refused.items():
        if value:
            raise ConfigError(
                f"{c.name}: {key} is {value!r}, and inputs for each layer, layers that share keys and values "
                "and experts are not supported in models of the type gemma4_text; expected 0 or false"
            )
    if (direction := c.take("use_bidirectional_attention", None)) not in (None, "vision"):
        raise ConfigError(
            f"{c.name}: use_bidirectional_attention is {direction!r}; a causal model has null, or 'vision'"
        )
