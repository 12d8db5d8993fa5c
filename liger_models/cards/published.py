"""Known models of a family: config.json of well-known sizes, and the features of their specs.

The configs are in a checkout, in tests/architectures/published: NAME.json holds {"parameters": ..., "config":
{...}}, `dropout`, the keys that request dropout, and `source`, the copy it was compared with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from liger_models.architectures import Architecture, find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    AttentionSpec,
    ChannelDeltaSpec,
    ConvolvedAttentionSpec,
    DifferentialAttentionSpec,
    GatedConvSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerNormSpec,
    LightningSpec,
    ModelSpec,
    MoESpec,
    RGLRUSpec,
    SelectiveSpec,
    SSDSpec,
)

FOLDER = Path("tests/architectures/published")


@dataclass(frozen=True)
class Published:
    """A model's config, and its number of parameters."""

    name: str
    parameters: int
    config: Mapping[str, Any]


def published(architecture: Architecture, repository: Path) -> list[Published]:
    """The family's known models, smallest first."""
    files = _by_family(repository / FOLDER).get(architecture.model_type, ())
    return sorted(map(read_published, files), key=lambda model: (model.parameters, model.name))


@functools.cache
def _by_family(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by the model type in their config, read once by a process."""
    found: dict[str, list[Path]] = {}
    for path in folder.glob("*.json"):
        found.setdefault(read_config(path)["model_type"], []).append(path)
    return found


def read_published(path: Path) -> Published:
    return Published(path.stem, json.loads(path.read_text())["parameters"], read_config(path))


def read_config(path: Path) -> Mapping[str, Any]:
    """The config in such a file, or in a config.json, without the keys to switch off."""
    raw = json.loads(path.read_text())
    return {**raw.get("config", raw), **dict.fromkeys(raw.get("dropout", ()), 0)}


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Config with only the first layers of the language model; per-layer lists are cut, too. Where the config
    counts several layers as one, whole ones.
    """
    if "text_config" in config:
        return {**config, "text_config": _with_first(config["text_config"], layers)}
    if "model_type" in config:
        layers = max(1, layers // find_architecture(config["model_type"]).layouts[0].in_one)
    return _with_first(config, layers)


def _with_first(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    counts = _keys_of_layers(config) or ["num_hidden_layers"]
    before: Any = config.get(counts[0])  # None: the default of its class
    cut: dict[str, Any] = {
        key: value[:layers] if _by_layer(key, value) and len(value) == before else value
        for key, value in config.items()
    }
    if shared := cut.get("num_kv_shared_layers"):  # the last ones
        cut["num_kv_shared_layers"] = max(0, layers - (config["num_hidden_layers"] - shared))
    for key in ("moe_layers", "cross_attention_layers"):
        if listed := cut.get(key):
            cut[key] = [layer for layer in listed if layer < layers]
    if own_sizes := cut.get("per_layer_config"):
        cut["per_layer_config"] = {i: sizes for i, sizes in own_sizes.items() if int(i) < layers}
    if runs := cut.get("attention_types"):  # of GPT-Neo: lists of kinds, and how often each is repeated
        kinds = [kind for listed, times in runs for _ in range(times) for kind in listed]
        cut["attention_types"] = [[kinds[:layers], 1]]
    if own := cut.get("linear_attn_config"):  # the lists in it count layers from 1
        cut["linear_attn_config"] = {
            key: [layer for layer in value if layer <= layers] if isinstance(value, list) else value
            for key, value in own.items()
        }
    return {**cut, **dict.fromkeys(counts, layers)}


def count_layers(config: Mapping[str, Any]) -> int:
    """Number of layers of the language model that a config gives, under any of the families' names."""
    text = config.get("text_config", config)
    return text[_keys_of_layers(text)[0]]


def _keys_of_layers(config: Mapping[str, Any]) -> list[str]:
    return [key for key in ("n_layer", "n_layers", "num_layers", "num_hidden_layers") if key in config]


def _by_layer(key: str, value: Any) -> bool:
    """Whether a value may have one element, or one letter (Nemotron-H), per layer."""
    return isinstance(value, list) or (isinstance(value, str) and key.endswith("_pattern"))


def layers_of_every_kind(config: Mapping[str, Any], numbers: bool = True) -> int:
    """Number of leading layers that include every kind of layer in the model. Layers that differ in numbers
    alone, such as a decay, are of one kind unless `numbers`; so are those with another activation, such as a
    cap, which costs the same.
    """
    blocks = find_architecture(config["model_type"]).spec(HFConfig.load(dict(config))).blocks
    kinds = [block if numbers else repr(_without_numbers(block)) for block in blocks]
    return next(count for count in range(1, len(kinds) + 1) if set(kinds[:count]) == set(kinds))


def _without_numbers(part: Any) -> Any:
    if is_dataclass(part):
        names = [field.name for field in fields(part) if field.name != "activation"]
        values = {name: _without_numbers(getattr(part, name)) for name in names}
        return type(part).__name__, values
    if isinstance(part, tuple | list):
        return [_without_numbers(one) for one in part]
    return 0 if isinstance(part, int | float) and not isinstance(part, bool) else part


def features_of_family(architecture: Architecture, repository: Path) -> list[str]:
    """Features of any known model, or of the family's test config if none is known."""
    configs = [model.config for model in published(architecture, repository)] or [architecture.tiny]
    found = [set(features(architecture.spec(HFConfig.load(dict(config))))) for config in configs]
    return [name for name in FEATURES if any(name in names for names in found)]


def features(spec: ModelSpec) -> Iterator[str]:
    """Names in `FEATURES` that apply to the spec."""
    for name, has in FEATURES.items():
        if has(spec):
            yield name


def _attention(spec: ModelSpec) -> list[AttentionSpec]:
    mixers = [mixer for block in spec.blocks for mixer in block.mixers]
    heads = [m.attention if isinstance(m, ConvolvedAttentionSpec) else m for m in mixers]
    return [m for m in heads if isinstance(m, AttentionSpec)]


def _windows(spec: ModelSpec) -> set[bool]:
    return {attention.window is not None for attention in _attention(spec)}


def _experts(spec: ModelSpec) -> list[MoESpec]:
    return [block.mixture for block in spec.blocks if block.mixture]


FEATURES: Mapping[str, Any] = {
    "grouped-query attention": lambda spec: any(
        a.num_key_value_heads < a.num_attention_heads for a in _attention(spec)
    ),
    "latent attention": lambda spec: any(isinstance(b.mixer, LatentAttentionSpec) for b in spec.blocks),
    "compressed keys": lambda spec: any(getattr(b.mixer, "compressor", None) for b in spec.blocks),
    "differential attention": lambda spec: any(
        isinstance(b.mixer, DifferentialAttentionSpec) for b in spec.blocks
    ),
    "convolved keys and values": lambda spec: any(
        isinstance(b.mixer, ConvolvedAttentionSpec) for b in spec.blocks
    ),
    "learned scores by distance": lambda spec: any(
        isinstance(b.mixer, ConvolvedAttentionSpec) for b in spec.blocks
    ),
    "sliding window": lambda spec: _windows(spec) == {True},
    "sliding window on some layers": lambda spec: _windows(spec) == {True, False},
    "chunked attention": lambda spec: any(a.chunk for a in _attention(spec)),
    "scores by distance (ALiBi)": lambda spec: any(a.slopes for a in _attention(spec)),
    "attention sinks": lambda spec: any(getattr(m, "sinks", False) for b in spec.blocks for m in b.mixers),
    "QK-norm": lambda spec: any(a.qk_norm for a in _attention(spec)),
    "attention soft-capping": lambda spec: any(a.softcap for a in _attention(spec)),
    "logit soft-capping": lambda spec: spec.logit_softcap is not None,
    "QKV biases": lambda spec: any(a.qkv_bias for a in _attention(spec)),
    "learned positions": lambda spec: spec.learned_positions is not None,
    "sinusoidal positions": lambda spec: spec.sinusoidal_positions,
    "layers without positions (NoPE)": lambda spec: (
        (spec.learned_positions is None and not spec.sinusoidal_positions)
        and any(
            not m.ropes and not getattr(m, "slopes", None)
            for b in spec.blocks
            for m in b.mixers
            if isinstance(m, AttentionSpec | LatentAttentionSpec)
        )
    ),
    "gated delta rule": lambda spec: any(isinstance(b.recurrent, GatedDeltaSpec) for b in spec.blocks),
    "Kimi delta attention": lambda spec: any(isinstance(b.recurrent, ChannelDeltaSpec) for b in spec.blocks),
    "state space layers (Mamba)": lambda spec: any(
        isinstance(b.recurrent, SelectiveSpec) for b in spec.blocks
    ),
    "state space layers (Mamba 2)": lambda spec: any(isinstance(b.recurrent, SSDSpec) for b in spec.blocks),
    "lightning attention": lambda spec: any(isinstance(b.recurrent, LightningSpec) for b in spec.blocks),
    "gated recurrence (RG-LRU)": lambda spec: any(isinstance(b.recurrent, RGLRUSpec) for b in spec.blocks),
    "gated short convolutions": lambda spec: any(isinstance(b.mixer, GatedConvSpec) for b in spec.blocks),
    "interleaved rotary": lambda spec: any(rope.interleaved for rope in spec.ropes),
    "partial rotary": lambda spec: any(a.rope and a.rope.dim < a.head_dim for a in _attention(spec)),
    **{
        f"RoPE scaling ({rope_type})": lambda spec, rope_type=rope_type: any(
            rope.type == rope_type for rope in spec.ropes
        )
        for rope_type in ("linear", "dynamic", "yarn", "longrope", "llama3")
    },
    "experts": lambda spec: bool(_experts(spec)),
    "experts by token id": lambda spec: any(experts.by_token_id for experts in _experts(spec)),
    "latent experts": lambda spec: any(experts.latent_size for experts in _experts(spec)),
    "shared experts": lambda spec: any(experts.shared_expert for experts in _experts(spec)),
    "experts of every token in the softmax": lambda spec: any(e.sink_experts for e in _experts(spec)),
    "several residual streams": lambda spec: spec.streams is not None,
    "embeddings of n-grams": lambda spec: any(block.ngrams for block in spec.blocks),
    "LayerNorm": lambda spec: isinstance(spec.norm, LayerNormSpec),
    "sandwich norms": lambda spec: any(b.topology == "sandwich" for b in spec.blocks),
    "post-norms": lambda spec: any(b.topology == "post_norm" for b in spec.blocks),
    "parallel attention and MLP": lambda spec: any(b.topology.startswith("parallel") for b in spec.blocks),
    "tied embeddings": lambda spec: spec.tie_word_embeddings,
    "images": lambda spec: spec.vision is not None,
    "audio": lambda spec: spec.audio is not None,
    "videos": lambda spec: getattr(spec.vision, "video_id", None) is not None,
}
"""Features, each with a predicate on specs."""
