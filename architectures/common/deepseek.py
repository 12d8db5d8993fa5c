"""DeepSeek's layers, also used by other families: latent attention, and grouped experts with shared ones. At
the end, settings for these families' tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.mlps import activation, expert_layouts, experts_and_chosen, mlp
from liger_models.architectures.common.model import layer_types
from liger_models.architectures.common.rotary import rope
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import IndexerSpec, LatentAttentionSpec, MLPSpec, MoESpec, RopeSpec

SHARED_EXPERTS = (".shared_expert.", ".shared_experts.")
"""Checkpoint names of the latent projections."""


def latent_attention(
    c: HFConfig,
    *,
    partial: bool = False,
    positions: bool = True,
    interleaved: bool | None = None,
    **rotary: Any,
) -> LatentAttentionSpec:
    """Latent attention, from the keys of DeepSeek's configs.

    Args:
        partial: rotate the fraction `partial_rotary_factor` of a head (Mistral 4), instead of a separate
            part.
        positions: without them no part of a head is rotated.
        interleaved: whether rotated pairs are; None: `rope_interleave` says so.
        rotary: further options of `rope`.
    """
    heads, nope = c.take_count("num_attention_heads"), c.take_count("qk_nope_head_dim")
    kv_heads = c.take_count("num_key_value_heads", heads)
    if kv_heads != heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; latent attention "
            "requires equal numbers"
        )
    dim = c.take_count("qk_rope_head_dim", least=int(positions))
    spec = LatentAttentionSpec(
        num_attention_heads=heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=dim,
        v_head_dim=c.take_count("v_head_dim"),
        kv_lora_rank=c.take_count("kv_lora_rank"),
        scale=(nope + dim) ** -0.5,
        q_lora_rank=c.take_count("q_lora_rank", None),
        bias=c.take_flag("attention_bias", False),
    )
    if not positions:
        return spec
    head = nope + dim if partial else dim
    if interleaved is None:
        interleaved = c.take_flag("rope_interleave", False)
    turned = rope(c, head, partial=dim / head if partial else None, interleaved=interleaved, **rotary)
    if turned.dim != dim:
        raise ConfigError(
            f"{c.name}: partial_rotary_factor is {turned.dim / head}, of heads of {head}, but "
            f"qk_rope_head_dim {dim}; make them agree, or remove the first"
        )
    # Consistent with the other keys. As head_dim GLM-5.2 states the part without positions, Hunyuan 4 both,
    # and Sarvam 105B what a cache holds.
    sizes_of_head = head, nope, nope + dim, spec.kv_lora_rank + dim
    of_queries = (("qk_head_dim", nope + dim), ("q_head_dim", nope + dim))
    for key, size, *others in (("head_dim", *sizes_of_head), *of_queries):
        if c.take_count(key, size) not in (size, *others):
            raise ConfigError(f"{c.name}: {key} must be {size}, as the sizes of its parts are, or left out")
    return with_positions(spec, turned)


def indexer(c: HFConfig, *, interleaved: bool) -> IndexerSpec:
    """The indexer of a layer, from the keys of DeepSeek-V3.2's configs, rotated interleaved or by halves."""
    c.take_only(rope_interleave=True, indexer_rope_interleave=interleaved)
    return IndexerSpec(
        num_heads=c.take_count("index_n_heads"),
        head_dim=c.take_count("index_head_dim"),
        top_k=c.take_count("index_topk"),
        interleaved=interleaved,
    )


def indexed_layers(c: HFConfig) -> None:
    """Check that `layer_types`, if given, names attention with an indexer for every layer, by transformers'
    name or the one before 5.23.
    """
    layer_types(c, lambda i: "indexed_attention", ("indexed_attention", "deepseek_sparse_attention"))


def older_choices(c: HFConfig) -> Callable[[int], str]:
    """Who chooses a layer's keys, from older keys: a pattern such as "FFSS", or a frequency and an offset."""
    pattern = c.take("index_topk_pattern", None)
    every, offset = c.take_count("index_topk_freq", 1), c.take_count("index_skip_topk_offset", 2, least=0)
    if pattern is None:
        return lambda i: "shared" if max(i - offset + 1, 0) % every else "full"
    types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    return lambda i: types[i] if i < len(types) else ""


def choices_of_keys(
    c: HFConfig, layers: Sequence[LatentAttentionSpec], indexer: IndexerSpec, default: Callable[[int], str]
) -> list[LatentAttentionSpec]:
    """The attention of each of these layers: with an indexer of its own ("full" in `indexer_types`), or to
    the keys that the last of these has chosen ("shared"). By default `default(layer)` says which.

    Raises:
        ConfigError: not one type per layer, other types, or a first layer that shares.
    """
    types = layer_types(c, default, ("full", "shared"), "indexer_types")
    if types[0] != "full":
        raise ConfigError(
            f"{c.name}: the first layer has no keys to share; indexer_types must begin with full"
        )
    mixers, chosen_by = [], 0
    for i, (mixer, kind) in enumerate(zip(layers, types, strict=True)):
        if kind == "full":
            chosen_by = i
        mixers.append(
            replace(mixer, indexer=indexer) if kind == "full" else replace(mixer, keys_of=chosen_by)
        )
    return mixers


def with_positions(spec: LatentAttentionSpec, rope: RopeSpec) -> LatentAttentionSpec:
    """Latent attention with rotary positions, whose scaling may change the scale of scores."""
    scale = spec.scale
    if rope.type != "default" and rope.mscale_all_dim and rope.factor and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    return replace(spec, rope=rope, scale=scale)


def dense_then(
    c: HFConfig, experts: MoESpec, *, first_dense: int = 0, bias: bool = False
) -> list[MLPSpec | MoESpec]:
    """MLP or experts of each layer: the first `first_k_dense_replace` layers have an MLP, the others these
    experts.

    Args:
        first_dense: default of that key.
        bias: of the MLPs.

    Raises:
        ConfigError: not a valid number of layers.
    """
    first = c.take_count("first_k_dense_replace", first_dense, least=0)
    dense = mlp(c, bias=bias)
    return [dense if i < first else experts for i in range(c.take_count("num_hidden_layers"))]


def dense_or_sparse(
    c: HFConfig, dense: MLPSpec, sparse: MoESpec, first_dense: int
) -> list[MLPSpec | MoESpec]:
    """MLP or experts of each layer, from `mlp_layer_types`; by default the first `first_dense` layers have
    the MLP.

    Raises:
        ConfigError: not one type per layer, or another type.
    """
    kinds = ("dense", "sparse")
    types = layer_types(c, lambda i: kinds[i >= first_dense], kinds, "mlp_layer_types")
    return [dense if kind == "dense" else sparse for kind in types]


def routed_and_shared_experts(
    c: HFConfig,
    keys: Sequence[str] = ("n_routed_experts",),
    *,
    shared: str | None = "n_shared_experts",
    in_groups: bool = True,
    bias: bool = False,
    plain: str | None = None,
    shared_size: int | None = None,
    **settings: Any,
) -> MoESpec:
    """Routed and shared experts, the latter as one MLP, from the keys of DeepSeek's configs.

    Args:
        keys: names of the key with the number of experts.
        shared: the key with the number of shared experts; None: there are none.
        in_groups: choose a token's experts from the best groups.
        bias: of the shared experts.
        plain: key of the activation of experts without gates; default: they have gates.
        shared_size: width of the shared experts; default: as many times that of one as the config says.
        settings: other fields of the `MoESpec`.
    """
    count, chosen = experts_and_chosen(c, keys)
    smallest = 1 if settings.get("group_score") == "max" else 2  # groups are scored by their two best
    groups = groups_and_chosen(c, count, chosen, smallest=smallest) if in_groups else (1, 1)
    inner, act = c.take_count("moe_intermediate_size"), activation(c, plain or "hidden_act", plain is None)
    if shared is not None and shared_size is None:
        shared_size = c.take_count(shared) * inner
    return MoESpec(
        count,
        chosen,
        inner,
        act,
        num_groups=groups[0],
        top_groups=groups[1],
        routed_scaling_factor=c.take_number("routed_scaling_factor", 1.0),
        shared_expert=None if shared_size is None else MLPSpec(shared_size, act, bias, gated=plain is None),
        **settings,
    )


def corrected_experts(c: HFConfig, scores: Collection[str] = ("sigmoid",), **settings: Any) -> MoESpec:
    """DeepSeek-V3's experts, chosen by sigmoid scores and a correction bias.

    Args:
        scores: names of these scores in the family's configs.
        settings: of `routed_and_shared_experts`.
    """
    c.take_only(topk_method="noaux_tc", moe_layer_freq=1)
    if (score := c.take("scoring_func", "sigmoid")) not in scores:
        raise ConfigError(f"{c.name}: scoring_func must be {' or '.join(map(repr, scores))}, found {score!r}")
    return routed_and_shared_experts(
        c,
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", False),
        correction_bias=True,
        float32_router=True,
        **settings,
    )


def groups_and_chosen(
    c: HFConfig, num_experts: int, top_k: int, *, smallest: int, keys: Sequence[str] = ("n_group",)
) -> tuple[int, int]:
    """Number of expert groups, and number of groups that a token's experts are chosen from. `keys` are names
    of the key with the first.

    Raises:
        ConfigError: the experts do not form equal groups of at least `smallest`.
    """
    groups, top_groups = c.take_count(tuple(keys)), c.take_count("topk_group")
    size, rest = divmod(num_experts, groups)
    if rest or size < smallest or top_groups > groups or top_k > top_groups * size:
        raise ConfigError(
            f"{c.name}: {num_experts} experts (n_routed_experts) with {top_k} per token do not fit {groups} "
            f"groups (n_group) with {top_groups} chosen (topk_group); expected equal groups of {smallest} or "
            "more experts, and enough of them"
        )
    return groups, top_groups


def corrected_layouts() -> tuple[Layout, ...]:
    """Layouts of checkpoints with such experts: separate, or all in one tensor."""
    return expert_layouts(
        (".router.correction_bias", ".gate.e_score_correction_bias"),
        SHARED_EXPERTS,
    )


def further_predictions(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the tensors of multi-token prediction layers, which follow the last layer and do not
    run."""
    first = c.take_count("num_hidden_layers")
    count = c.take_count("num_nextn_predict_layers", 1, least=0)
    return tuple(f"model.layers.{first + i}.*" for i in range(count))


IN_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
TINY_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-3,
}
SKIP_EXPERTS = {f"key:{key}": "has one value" for key in ("scoring_func", "topk_method", "moe_layer_freq")}
TINY_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": ...,
    "rope_interleave": True,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
TINY_INDEXER: Mapping[str, Any] = {
    "index_n_heads": 24,
    "index_head_dim": 10,
    "index_topk": 5,
    "rope_interleave": ...,
}
SKIP_INDEXER = {
    **{
        f"key:{key}": "has one value" for key in ("rope_interleave", "indexer_rope_interleave", "layer_types")
    },
    "field:IndexerSpec.norm_eps": "other scores choose the same keys: test_latent_attention.py",
}
SKIP_LATENT = {
    "variant:one_kv_head": "latent attention has a key head for each query head",
    "key:head_dim": "follows from the sizes of its parts, and is checked",
    "key:qk_head_dim": "the same",
    "key:q_head_dim": "the same",
}
LATENT_VARIANTS: Mapping[str, Any] = {
    "no latent of queries": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "rotated by halves": {"rope_interleave": False},
}
