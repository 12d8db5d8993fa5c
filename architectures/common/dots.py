"""Attention of dots3.note's language model: latents of two sizes, with an indexer or a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.deepseek import indexer
from liger_models.architectures.common.grouped_attention import head_size, layer_sizes
from liger_models.architectures.common.model import FULL, SLIDING, layer_types
from liger_models.architectures.common.rotary import rope
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import IndexerSpec, LatentAttentionSpec, NormSpec

INDEXED = "indexed_attention"
SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of attention that layers may have of their own, and those of layers with a window by default."""


def mixers(c: HFConfig, norm: NormSpec) -> list[LatentAttentionSpec]:
    """The attention of each layer. (In released configs FULL is the name of layers with an indexer.)"""
    stated, usual = layer_sizes(c, SIZES), {key: c.take_count(key) for key in SIZES if key != "head_dim"}
    usual["head_dim"] = head_size(c)
    types = layer_types(c, lambda i: INDEXED if i < 2 or i % 4 == 1 else SLIDING, (INDEXED, FULL, SLIDING))
    if "per_layer_config" not in c.raw:  # as released
        types = [INDEXED if kind == FULL else kind for kind in types]
        stated = [SIZES if kind == SLIDING else {} for kind in types]
    stated = stated or [{}] * len(types)
    chooser, window = indexer(c, interleaved=True), c.take_count("sliding_window")
    made = []
    for kind, own in zip(types, stated, strict=True):
        mixer = _latent(c, norm, kind, {**usual, **own})
        if kind == SLIDING:
            mixer = replace(mixer, window=window)
        made.append(_with_indexer(c, mixer, chooser) if kind == INDEXED else mixer)
    return made


def _latent(c: HFConfig, norm: NormSpec, kind: str, sizes: Mapping[str, int]) -> LatentAttentionSpec:
    """Attention of these sizes, in a layer of this type."""
    heads, nope, dim = (sizes[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    if (of_keys := sizes["num_key_value_heads"]) != heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads} and num_key_value_heads {of_keys} in a layer of type "
            f"{kind}; latent attention requires equal numbers"
        )
    head, hidden = sizes["head_dim"], c.take_count("hidden_size")
    of_kind: dict[str, Any] = {"layer_type": kind, "theta": 8e7, "local_theta": 5e4}
    turned = rope(c, head, **of_kind, partial=dim / head, interleaved=True, dim=dim)
    return LatentAttentionSpec(
        num_attention_heads=heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=dim,
        v_head_dim=sizes["v_head_dim"],
        kv_lora_rank=sizes["kv_lora_rank"],
        scale=(nope + dim) ** -0.5 * math.sqrt(hidden / sizes["q_lora_rank"]),
        q_lora_rank=sizes["q_lora_rank"],
        rope=turned,
        bias=c.take_flag("attention_bias", False),
        norm=norm,
        latent_scale=math.sqrt(hidden / sizes["kv_lora_rank"]),
        gates="heads",
        k_rope_norm=True,
    )


def _with_indexer(c: HFConfig, mixer: LatentAttentionSpec, chooser: IndexerSpec) -> LatentAttentionSpec:
    """The indexer reads the scaled latent of queries, too."""
    scale = math.sqrt(c.take_count("hidden_size") / (mixer.q_lora_rank or 1))
    return replace(mixer, indexer=replace(chooser, scale=scale))
