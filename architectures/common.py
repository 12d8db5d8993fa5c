"""What many families' configs have in common, read into specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    LatentAttentionSpec,
    LayerNormSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    QueryScaleSpec,
    RopeSpec,
    SharedAttentionSpec,
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Types of layers."""


def decoder(
    c: HFConfig, blocks: Sequence[BlockSpec], norm: NormSpec | LayerNormSpec, **settings: Any
) -> ModelSpec:
    """A model of these blocks, with what nearly every config says of the rest. `settings` are further fields
    of the `ModelSpec`.
    """
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=c.take_count("hidden_size"),
        blocks=tuple(blocks),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", False),
        initializer_range=c.take_number("initializer_range", 0.02),
        padding_idx=padding_row(c),
        **settings,
    )


def take_only(c: HFConfig, **values: Any) -> None:
    """Take keys that may stand in a config, each with the one value that is known.

    Raises:
        ConfigError: it has another.
    """
    for key, only in values.items():
        if (found := c.take(key, only)) != only:
            raise ConfigError(
                f"{c.name}: {key} must be {only!r}, which is all that is known, found {found!r}"
            )


def padding_row(c: HFConfig) -> int | None:
    """The row of each embedding that belongs to padding; a negative id counts from the end, as in the
    references.

    Raises:
        ConfigError: there is no such row.
    """
    pad, vocab = c.take("pad_token_id", None), c.take_count("vocab_size")
    if pad is None:
        return None
    if type(pad) is not int or not -vocab <= pad < vocab:
        raise ConfigError(
            f"{c.name}: pad_token_id must be an id of the vocabulary of {vocab}, or null, found {pad!r}"
        )
    return pad


def layer_types(
    c: HFConfig, default: Callable[[int], str], known: Sequence[str], key: str = "layer_types"
) -> list[str]:
    """The type of each layer, by the config's `key`, or by `default(layer)` where the config does not say.

    Raises:
        ConfigError: as many types as layers, each one of `known`, are not there.
    """
    count = c.take_count("num_hidden_layers")
    types = c.take(key, None)
    if types is None:
        types = [default(i) for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= set(known):
        raise ConfigError(
            f"{c.name}: {key} must name {' or '.join(known)} for each of the {count} layers, found {types}"
        )
    return types


def turning_layers(c: HFConfig) -> list[bool]:
    """Which layers turn queries and keys: those for which `no_rope_layers`, despite its name, has a 1; if it
    is missing or empty, all but each `no_rope_layer_interval`-th.

    Raises:
        ConfigError: it does not fit the layers.
    """
    count, every = c.take_count("num_hidden_layers"), c.take_count("no_rope_layer_interval", 4)
    marks = c.take("no_rope_layers", None)
    if marks in (None, []):
        return [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(marks, list) or len(marks) != count or any(mark not in (0, 1) for mark in marks):
        raise ConfigError(
            f"{c.name}: no_rope_layers must have a 0 or a 1 for each of the {count} layers, found {marks}"
        )
    return [bool(mark) for mark in marks]


def windows(c: HFConfig, default: Callable[[int], str], *, off: bool = False) -> list[int | None]:
    """The window of each layer: `sliding_window` where its type is sliding_attention, else None.

    Args:
        default: the type of a layer where the config has no `layer_types`.
        off: the config has switched windows off.

    Raises:
        ConfigError: an unknown type, or layers that slide without a window.
    """
    types = layer_types(c, default, (FULL, SLIDING))
    c.take("sliding_window", None)  # which some references write as 0 where windows are off
    window = None if off else c.take_count("sliding_window", None)
    if SLIDING in types and window is None:
        raise ConfigError(
            f"{c.name}: some layers are of type {SLIDING}, but sliding_window is missing or switched off"
        )
    return [window if kind == SLIDING else None for kind in types]


def chunks(c: HFConfig, default: Callable[[int], str]) -> list[int | None]:
    """The size of each layer's chunks: `attention_chunk_size` where its type is chunked_attention, else None.

    Args:
        default: the type of a layer where the config has no `layer_types`.

    Raises:
        ConfigError: an unknown type, or layers in chunks without a size.
    """
    types, size = layer_types(c, default, (FULL, CHUNKED)), c.take_count("attention_chunk_size", None)
    if CHUNKED in types and size is None:
        raise ConfigError(f"{c.name}: some layers are of type {CHUNKED}, but attention_chunk_size is missing")
    return [size if kind == CHUNKED else None for kind in types]


def attention(c: HFConfig, *, bias: bool = False, window: int | None = None, **rotary: Any) -> AttentionSpec:
    """Grouped-query attention with rotary positions, from the keys that nearly every config has. `rotary` are
    options of `rope`.
    """
    hidden_size, heads = c.take_count("hidden_size"), c.take_count("num_attention_heads")
    kv_heads = c.take_count("num_key_value_heads", heads)
    check_groups(c, heads, kv_heads)
    head_dim = c.take_count("head_dim", None)
    if head_dim is None:
        if hidden_size % heads:
            raise ConfigError(
                f"{c.name}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{heads}; give head_dim"
            )
        head_dim = hidden_size // heads
    return AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(c, head_dim, **rotary),
        window=window,
        qkv_bias=bias,
        o_bias=bias,
    )


def layer_sizes(c: HFConfig, keys: Collection[str]) -> list[dict[str, Any]] | None:
    """What each layer has in place of the model's own sizes, by `per_layer_config`; None where the config has
    none. `keys` are those that may stand there.

    Raises:
        ConfigError: it is no such table.
    """
    count, stated = c.take_count("num_hidden_layers"), c.take("per_layer_config", None)
    if stated is None:
        return None
    if not isinstance(stated, dict) or not all(
        str(key).isdecimal()
        and int(key) < count  # "05" too
        and isinstance(sizes, dict)
        and sizes.keys() <= set(keys)
        and all(type(size) is int and size > 0 for size in sizes.values())
        for key, sizes in stated.items()
    ):
        raise ConfigError(
            f"{c.name}: per_layer_config must give some of the {count} layers, by their numbers, whole "
            f"numbers for {' and '.join(keys)}, found {abbreviate(stated)}"
        )
    by_number = {int(key): sizes for key, sizes in stated.items()}
    return [by_number.get(i, {}) for i in range(count)]


def share_keys(c: HFConfig, mixers: Sequence[AttentionSpec]) -> list[AttentionSpec | SharedAttentionSpec]:
    """Let the last `num_kv_shared_layers` read the keys and values of the last layer before them with the
    same window.

    Raises:
        ConfigError: there is no such layer, or its heads are others.
    """
    first = len(mixers) - c.take_count("num_kv_shared_layers", 0, least=0)
    own = {mixer.window: i for i, mixer in enumerate(mixers[: max(first, 0)])}

    def reading(attn: AttentionSpec) -> SharedAttentionSpec:
        source = own.get(attn.window)
        sizes = attn.num_key_value_heads, attn.head_dim
        if source is None or sizes != (mixers[source].num_key_value_heads, mixers[source].head_dim):
            raise ConfigError(
                f"{c.name}: num_kv_shared_layers is {len(mixers) - first}; expected a layer before those of "
                "each type that is among them, with heads of the same number and size"
            )
        return SharedAttentionSpec(
            attn.num_attention_heads,
            *sizes,
            attn.scale,
            source,
            attn.rope,
            attn.window,
            attn.qkv_bias,
            None if attn.qk_norm is None else attn.qk_norm.norm,
        )

    return [mixer if i < first else reading(mixer) for i, mixer in enumerate(mixers)]


def unread_keys(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the tensors of keys and values in layers that read those of others."""
    last, shared = c.take_count("num_hidden_layers"), c.take_count("num_kv_shared_layers", 0, least=0)
    parts = ("k_proj", "v_proj", "k_norm")
    layers = range(max(last - shared, 0), last)
    return tuple(f"model.layers.{i}.self_attn.{part}.*" for i in layers for part in parts)


def check_groups(c: HFConfig, heads: int, kv_heads: int) -> None:
    """
    Raises:
        ConfigError: heads of queries cannot be divided among those of keys and values.
    """
    if heads % kv_heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; "
            "the first must be a multiple of the second"
        )


def rope(
    c: HFConfig,
    head_dim: int,
    *,
    layer_type: str | None = None,
    partial: float | None = None,
    interleaved: bool = False,
    theta: float = 10000.0,
    local_theta: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    extra: Collection[str] = (),
) -> RopeSpec:
    """The rotary settings, in whichever spelling the config has them.

    Args:
        layer_type: of families whose layers turn differently by type.
        partial: the share of a head that turns where the config does not say; None: whole heads always do.
        interleaved: pairs are neighbours, (2i, 2i + 1), and not (i, i + dim / 2).
        theta, scaling: where the config does not say.
        local_theta: of sliding layers whose theta is not that of the others, where the config does not say.
        extra: see `HFConfig.take_rope`; what comes back there is not for the tables.
    """
    settings = c.take_rope(
        layer_type,
        default_theta=theta,
        head_dim_default_partial=partial or 1.0,
        default_scaling=scaling,
        default_local_theta=local_theta,
        extra=extra,
    )
    settings.pop("extra", None)
    if "mrope_section" in settings:
        raise ConfigError(
            f"{c.name}: mrope_section asks for rotary positions on several axes, which {c.model_type!r} "
            "models do not have"
        )
    share = settings.pop("partial_rotary_factor")
    if settings["rope_type"] == "proportional":  # of a whole head's pairs the first turn
        factor = settings.pop("factor")
        settings |= {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        settings["turning"], share = int(share * head_dim // 2), 1.0
    if partial is None and share != 1:  # the references turn whole heads, whatever the config says
        raise ConfigError(
            f"{c.name}: partial_rotary_factor is {share}, but {c.model_type!r} models turn "
            "whole heads; remove it"
        )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ConfigError(f"{c.name}: rotary positions need an even number of dimensions, found {dim}")
    for key in ("short_factor", "long_factor"):
        if key in settings and len(settings[key]) != dim // 2:
            raise ConfigError(f"{c.name}: {key} must hold {dim // 2} numbers, found {len(settings[key])}")
    return RopeSpec(
        dim=dim,
        theta=settings.pop("rope_theta"),
        type=settings.pop("rope_type"),
        interleaved=interleaved,
        max_position_embeddings=c.take_count("max_position_embeddings"),
        **settings,
    )


def mlp(c: HFConfig, *, bias: bool = False, gated: bool = True, key: str = "hidden_act") -> MLPSpec:
    """An MLP, from the keys that nearly every config has; `key` is that of the activation."""
    return MLPSpec(c.take_count("intermediate_size"), activation(c, key, gated), bias, gated)


def dense_then(
    c: HFConfig, experts: MoESpec, *, first_dense: int = 0, bias: bool = False
) -> list[MLPSpec | MoESpec]:
    """What each layer has: the first `first_k_dense_replace` an MLP, all others these experts.

    Args:
        first_dense: how many where the config does not say.
        bias: that of the MLPs.

    Raises:
        ConfigError: it is no count of layers.
    """
    first = c.take_count("first_k_dense_replace", first_dense, least=0)
    dense = mlp(c, bias=bias)
    return [dense if i < first else experts for i in range(c.take_count("num_hidden_layers"))]


def experts_and_chosen(
    c: HFConfig,
    keys: Sequence[str] = ("num_experts", "num_local_experts"),
    chosen_keys: Sequence[str] = ("num_experts_per_tok",),
) -> tuple[int, int]:
    """How many experts there are, and how many of them a token goes to; both by any of several keys.

    Raises:
        ConfigError: a token cannot go to so many.
    """
    experts, chosen = c.take_one_of(*keys), c.take_one_of(*chosen_keys)
    if not all(type(count) is int for count in (experts, chosen)) or not 1 <= chosen <= experts:
        raise ConfigError(
            f"{c.name}: {chosen_keys[0]} is {chosen!r} and {keys[0]} {experts!r}; expected whole numbers, "
            "the first at least 1 and at most the second"
        )
    return experts, chosen


def chosen_experts(
    c: HFConfig,
    keys: Sequence[str] = ("num_experts", "num_local_experts"),
    chosen_keys: Sequence[str] = ("num_experts_per_tok",),
    *,
    size: str = "moe_intermediate_size",
    **settings: Any,
) -> MoESpec:
    """Experts, from the keys that many configs have; `size` is that of their width. `settings` are further
    fields of the `MoESpec`.
    """
    return MoESpec(
        *experts_and_chosen(c, keys, chosen_keys),
        intermediate_size=c.take_count(size),
        activation=activation(c),
        aux_loss_coef=aux_loss_coef(c),
        **settings,
    )


def expert_layouts(*rename: tuple[str, str]) -> tuple[Layout, ...]:
    """Of checkpoints that hold each expert by itself, or all in one tensor; `rename` comes first."""
    names = (*rename, (".router.", ".gate."))
    return Layout(names), Layout(names, whole=("*.experts.*",))


def aux_loss_coef(c: HFConfig) -> float:
    """The weight of the load balancing loss: the references add it where `output_router_logits` says so."""
    coef = c.take_number("router_aux_loss_coef")
    return coef if c.take_flag("output_router_logits", False) else 0.0


def activation(c: HFConfig, key: str = "hidden_act", gated: bool = True) -> Activation:
    """The kernel of the activation that the config names."""
    name = c.take(key, "silu")
    known = [known for known in _ACTIVATIONS if not (gated and known in ("relu2", "xielu"))]
    if name not in known:
        raise ConfigError(f"{c.name}: {key} {name!r} is unknown; expected one of {', '.join(known)}")
    return _ACTIVATIONS[name]


def latent_attention(c: HFConfig, *, partial: bool = False, **rotary: Any) -> LatentAttentionSpec:
    """Latent attention, from the keys of DeepSeek's configs.

    Args:
        partial: what turns of a head is its `partial_rotary_factor` (Mistral 4), and not a head of its own.
        rotary: further options of `rope`.
    """
    heads, nope = c.take_count("num_attention_heads"), c.take_count("qk_nope_head_dim")
    kv_heads = c.take_count("num_key_value_heads", heads)
    if kv_heads != heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; latent attention "
            "has as many of both"
        )
    dim = c.take_count("qk_rope_head_dim")
    head = nope + dim if partial else dim
    rotary["interleaved"] = c.take_flag("rope_interleave", False)
    turned = rope(c, head, partial=dim / head if partial else None, **rotary)
    if turned.dim != dim:
        raise ConfigError(
            f"{c.name}: partial_rotary_factor is {turned.dim / head}, of heads of {head}, but "
            f"qk_rope_head_dim {dim}; let them agree, or remove the first"
        )
    for key, size in (("head_dim", head), ("qk_head_dim", nope + dim)):  # as the other keys say
        if c.take_count(key, size) != size:
            raise ConfigError(f"{c.name}: {key} must be {size}, as the sizes of its parts are, or left out")
    scale = (nope + dim) ** -0.5
    if turned.type != "default" and turned.mscale_all_dim and turned.factor and turned.factor > 1:
        scale *= (0.1 * turned.mscale_all_dim * math.log(turned.factor) + 1) ** 2
    return LatentAttentionSpec(
        num_attention_heads=heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=dim,
        v_head_dim=c.take_count("v_head_dim"),
        kv_lora_rank=c.take_count("kv_lora_rank"),
        scale=scale,
        q_lora_rank=c.take_count("q_lora_rank", None),
        rope=turned,
        bias=c.take_flag("attention_bias", False),
    )


GROWING_QUERIES = ("llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings")
"""What stands among rotary settings where queries grow: `extra` of `rope`. The last is another key again."""


def query_scale(c: HFConfig, scaling: Mapping[str, Any]) -> QueryScaleSpec:
    """How queries grow with their positions, from the rotary settings; `scaling` as of `rope`.

    Raises:
        ConfigError: they do not say.
    """
    settings = c.take_rope(default_scaling=scaling, extra=GROWING_QUERIES)
    stated = {**settings, **settings["extra"]}
    beta, length = (stated.get(key) for key in GROWING_QUERIES[:2])
    if not beta or type(length) is not int or length < 1:
        raise ConfigError(
            f"{c.name}: {c.model_type} models need {' and '.join(GROWING_QUERIES[:2])} in rope_parameters, "
            f"found {beta} and {length}"
        )
    return QueryScaleSpec(beta, length)


def corrected_experts(c: HFConfig, scores: Collection[str] = ("sigmoid",)) -> MoESpec:
    """Experts chosen by sigmoid scores and a correction bias, in groups, and one that all tokens share, from
    the keys of DeepSeek-V3's configs.

    Args:
        scores: the names that the family's configs have for these scores.
    """
    take_only(c, topk_method="noaux_tc", moe_layer_freq=1)
    if (score := c.take("scoring_func", "sigmoid")) not in scores:
        raise ConfigError(f"{c.name}: scoring_func must be {' or '.join(map(repr, scores))}, found {score!r}")
    num_experts, top_k = c.take_count("n_routed_experts"), c.take_count("num_experts_per_tok")
    groups, top_groups = groups_and_chosen(c, num_experts, top_k, smallest=2)
    inner, act = c.take_count("moe_intermediate_size"), activation(c)
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=top_k,
        intermediate_size=inner,
        activation=act,
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", False),
        correction_bias=True,
        num_groups=groups,
        top_groups=top_groups,
        routed_scaling_factor=c.take_number("routed_scaling_factor", 1.0),
        float32_router=True,
        shared_expert=MLPSpec(c.take_count("n_shared_experts") * inner, act),
    )


def groups_and_chosen(c: HFConfig, num_experts: int, top_k: int, *, smallest: int = 1) -> tuple[int, int]:
    """How many groups there are of experts, and from how many of them a token's are chosen.

    Raises:
        ConfigError: the experts do not fall into such groups, of `smallest` experts at the least.
    """
    groups, top_groups = c.take_count("n_group"), c.take_count("topk_group")
    size, rest = divmod(num_experts, groups)
    if rest or size < smallest or top_groups > groups or top_k > top_groups * size:
        raise ConfigError(
            f"{c.name}: {num_experts} experts (n_routed_experts), {top_k} a token, do not fit {groups} "
            f"groups (n_group), of which {top_groups} are taken (topk_group); expected groups of one size, "
            f"{smallest} or more, and enough of them"
        )
    return groups, top_groups


def corrected_layouts() -> tuple[Layout, ...]:
    """Of checkpoints with such experts: one by one, or all in one tensor."""
    return expert_layouts(
        (".router.correction_bias", ".gate.e_score_correction_bias"),
        (".shared_expert.", ".shared_experts."),
    )


def further_predictions(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the tensors of layers behind the last, which predict further tokens and are not run."""
    first = c.take_count("num_hidden_layers")
    count = c.take_count("num_nextn_predict_layers", 1, least=0)
    return tuple(f"model.layers.{first + i}.*" for i in range(count))
