"""DeepSeek-V4's layers, from the keys of its configs and of older ones: attention to compressed keys, and
experts that are chosen by scores or by token ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.architectures.common.grouped_attention import head_size
from liger_models.architectures.common.mlps import aux_loss_coef, experts_and_chosen
from liger_models.architectures.common.model import layer_types
from liger_models.architectures.common.rotary import rope
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_nested
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    ClampedSwiGLU,
    CompressedAttentionSpec,
    CompressorSpec,
    IndexerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
)

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_OF_RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
_LABELS = ("main", "compress")


def compressed_attention(c: HFConfig, norm: NormSpec) -> list[CompressedAttentionSpec]:
    """The attention of each layer: to a window alone, with rotary settings of its own, or also to compressed
    keys; in layers of the type compressed_sparse_attention an indexer chooses among these.

    Raises:
        ConfigError: heads that do not form the groups, or an indexer narrower than what is rotated.
    """
    heads, head_dim = c.take_count("num_attention_heads"), head_size(c)
    main, compress = rotary_settings(c, head_dim)
    rates = compress_rates(c)
    index_heads, index_dim = c.take_count("index_n_heads"), c.take_count("index_head_dim")
    indexer = IndexerSpec(index_heads, index_dim, c.take_count("index_topk"), interleaved=True)
    groups = c.take_count("o_groups")
    if heads % groups or indexer.head_dim < compress.dim:
        raise ConfigError(
            f"{c.name}: found {heads} heads, o_groups {groups} and index_head_dim {indexer.head_dim}; "
            f"expected a divisor of the heads, and at least {compress.dim} dimensions, which are rotated"
        )
    compressors = {
        WINDOW: None,
        SPARSE: CompressorSpec(rates[SPARSE], overlapping=True, indexer=indexer),
        HEAVY: CompressorSpec(rates[HEAVY]),
    }
    shared: Any = {
        **{"num_attention_heads": heads, "head_dim": head_dim, "scale": head_dim**-0.5, "norm": norm},
        **{"window": c.take_count("sliding_window"), "q_lora_rank": c.take_count("q_lora_rank")},
        **{"o_groups": groups, "o_lora_rank": c.take_count("o_lora_rank")},
    }
    kinds = attention_types(c)
    return [
        CompressedAttentionSpec(
            rope=main if kind == WINDOW else compress, compressor=compressors[kind], **shared
        )
        for kind in kinds
    ]


def scored_or_hashed_experts(c: HFConfig) -> list[MoESpec]:
    """The experts of each layer, chosen by corrected scores, or by token ids."""
    inner = c.take_count("moe_intermediate_size")
    clamped = ClampedSwiGLU(1.0, c.take_number("swiglu_limit", 10.0), plus_one=False)
    scored = MoESpec(
        *experts_and_chosen(c, ("n_routed_experts",)),
        *(inner, clamped),
        score="sqrt_softplus",
        correction_bias=True,
        routed_scaling_factor=c.take_number("routed_scaling_factor", 1.5),
        shared_expert=MLPSpec(inner, clamped),
        aux_loss_coef=aux_loss_coef(c),
    )
    ids = c.take_count("vocab_size")
    hashed = replace(scored, correction_bias=False, by_token_id=ids, aux_loss_coef=0.0)
    count = c.take_count("num_hash_layers", 3, least=0)
    kinds = layer_types(
        c, lambda i: "moe" if i >= count else "hash_moe", ("hash_moe", "moe"), "mlp_layer_types"
    )
    return [hashed if kind == "hash_moe" else scored for kind in kinds]


def attention_types(c: HFConfig) -> list[str]:
    """The type of each layer, from `layer_types`, or `compress_ratios` of 0, 4 or 128, where those of modules
    for multi-token prediction may follow.

    Raises:
        ConfigError: other types or ratios, or too few.
    """
    count, ratios = c.take_count("num_hidden_layers"), c.take("compress_ratios", None)
    if ratios is None:
        return layer_types(c, lambda i: HEAVY if i < 2 or i % 2 == 0 else SPARSE, tuple(_OF_RATIOS.values()))
    if not isinstance(ratios, list) or len(ratios) < count or not set(ratios[:count]) <= _OF_RATIOS.keys():
        raise ConfigError(
            f"{c.name}: compress_ratios must have a 0, 4 or 128 for each of {count} layers, found {ratios}"
        )
    return layer_types(c, lambda i: _OF_RATIOS[ratios[i]], tuple(_OF_RATIOS.values()))


def compress_rates(c: HFConfig) -> dict[str, int]:
    """Tokens of a compressed key by type of layer, from `compress_rates`, or under older names.

    Raises:
        ConfigError: not such a table.
    """
    usual = {SPARSE: 4, HEAVY: 128}
    rates = c.take("compress_rates", usual)
    good = isinstance(rates, dict) and rates.keys() <= usual.keys()
    for kind, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        older = c.take_count(key, 0, least=0)
        rates = {**rates, kind: older or rates.get(kind)} if good else rates
    if not good or not all(type(rate) is int and rate > 0 for rate in rates.values()):
        raise ConfigError(
            f"{c.name}: compress_rates must have a whole number of 1 or more for each of {', '.join(usual)}, "
            f"found {rates}"
        )
    return rates


def rotary_settings(c: HFConfig, head_dim: int) -> list[RopeSpec]:
    """Rotary settings of layers without compressed keys, and of those with them.

    `rope_parameters` has both under "main" and "compress", or only the scaling of the latter, as has the
    older `rope_scaling`; then `rope_theta`, `compress_rope_theta` and the rotated share of a head stand
    outside.

    Raises:
        ConfigError: both spellings, other entries, or settings that depend on the length of a batch.
    """
    found = {key: c.take(key, None) for key in ("rope_parameters", "rope_scaling")}
    stated = [settings for settings in found.values() if settings]
    wide = c.take_count("qk_rope_head_dim", max(1, head_dim // 8))
    share = c.take_number("partial_rotary_factor", wide / head_dim)
    thetas = c.take_number("rope_theta", 1e4), c.take_number("compress_rope_theta", 1.6e5)
    settings: Any = stated[0] if stated else {}
    if len(stated) > 1 or not isinstance(settings, dict):
        raise ConfigError(f"{c.name}: expected one object with rotary settings, found {found}")
    if is_nested(settings):
        if set(settings) != set(_LABELS):
            raise ConfigError(
                f"{c.name}: rope_parameters must have {' and '.join(_LABELS)}, found {', '.join(settings)}"
            )
    else:
        more = (
            {"attention_factor": 1.0} if "yarn" in (settings.get("rope_type"), settings.get("type")) else {}
        )
        outside = ({"rope_theta": theta, "partial_rotary_factor": share} for theta in thetas)
        settings = dict(zip(_LABELS, ({}, {**more, **settings}), strict=True))
        settings = {label: {**settings[label], **own} for label, own in zip(_LABELS, outside, strict=True)}
    ropes = []
    for label in _LABELS:
        part = c.with_raw(
            {
                "model_type": c.model_type,
                "max_position_embeddings": c.take_count("max_position_embeddings"),
                "rope_parameters": settings[label],
            }
        )
        part.name = f"{c.name}, {label} of rope_parameters"
        ropes.append(rope(part, head_dim, partial=1.0, interleaved=True))
        if ropes[-1].depends_on_length:
            raise ConfigError(
                f"{part.name}: the type {ropes[-1].type!r} depends on the length of a batch, which "
                "compressed keys do not support; expected default, linear, llama3 or yarn"
            )
    return ropes
