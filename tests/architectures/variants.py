"""The configs with which a family is tested, derived from its tiny one: flipped flags, missing or null keys,
every rope type in both spellings, and the variants of its registration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pairs import ABSENT, LENGTH, changed, spec_of

from liger_models.architectures import Architecture, find_architecture, list_architectures
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.models.verification import config_class

Changes = dict[str, Any]

# Settings of every rope type, and max_position_embeddings.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, 64),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 64),
    "dynamic_within": ({"rope_type": "dynamic", "factor": 3.0}, 64),
    "dynamic_beyond": ({"rope_type": "dynamic", "factor": 3.0}, 8),
    "yarn": (YARN, 64),
    "yarn_attention_factor": ({**YARN, "attention_factor": 1.7}, 64),
    "yarn_mscale": ({**YARN, "mscale": 0.9, "mscale_all_dim": 0.5}, 64),
    "yarn_fractional": ({**YARN, "truncate": False, "beta_fast": 1.0, "beta_slow": 0.25}, 64),
    "longrope_short": ({**LONGROPE, "original_max_position_embeddings": 32}, 128),
    "longrope_long": (LONGROPE, 64),
    "longrope_attention_factor": ({**LONGROPE, "attention_factor": 1.3}, 64),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 4.5,
            "original_max_position_embeddings": 16,
        },
        128,
    ),
}
ROPE_FIELDS = {f"RopeSpec.{key}" for scaling, _ in ROPES.values() for key in scaling} | {
    f"RopeSpec.{key}" for key in ("short_factor", "long_factor", "max_position_embeddings")
}
ROPES_IN_TURN = "linear", "dynamic_beyond", "yarn_mscale", "longrope_long", "llama3"  # one of each type
THETA = 500.0  # so that the slowest dimension turns visibly within a short sequence
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def skipped(family: str, what: str, name: str) -> bool:
    """Whether the family's registration skips a case such as `rope:yarn`, which includes `rope:yarn_mscale`.
    `rope:all` includes the fields of all rope types.
    """
    entries = find_architecture(family).skip
    if "rope:all" in entries and (what == "rope" or (what == "field" and name in ROPE_FIELDS)):
        return True
    return any(entry == f"{what}:{name}" or f"{what}:{name}".startswith(f"{entry}_") for entry in entries)


def can_be_untied(family: str) -> bool:
    """Whether a config may have a head with a weight of its own."""
    return not skipped(family, "variant", "tie_word_embeddings=False")


def tied_if_possible(family: str, tied: bool) -> bool:
    """Whether the head is tied: `tied`, or as in all models of the reference."""
    if tied:
        return not skipped(family, "variant", "tie_word_embeddings=True")
    return not can_be_untied(family)


# Other sizes where every family's tiny config has one, so that only layers can go wrong.
OF_LAYERS = {
    "one_kv_head",
    "kv_heads_as_many_as_heads",
    "even_vocabulary",
    "window_of_one",
    "window_as_long_as_the_sequence",
}


def settings(family: str) -> dict[str, Changes]:
    """Changes of settings that nearly every family has: heads, vocabulary, windows, an activation."""
    tiny = find_architecture(family).tiny
    heads = tiny.get("num_attention_heads")
    table = {
        "one_kv_head": {"num_key_value_heads": 1},
        "kv_heads_as_many_as_heads": {"num_key_value_heads": heads},
        "head_dim_apart": {"head_dim": 24},
        "even_vocabulary": {"vocab_size": 128},
        "window_of_one": {"sliding_window": 1},
        "window_as_long_as_the_sequence": {"sliding_window": LENGTH},
        "hidden_act": {"hidden_act": "gelu"},
        "hidden_activation": {"hidden_activation": "gelu"},
    }
    return {name: changes for name, changes in table.items() if changes.keys() <= tiny.keys()}


def flags(family: str) -> dict[str, Changes]:
    """Changes that flip each boolean of the tiny config, and whether the head is tied."""
    tiny = find_architecture(family).tiny
    tied = spec_of(family).tie_word_embeddings
    turned = {key: not value for key, value in tiny.items() if isinstance(value, bool)}
    turned["tie_word_embeddings"] = not tied
    return {f"{key}={value}": {key: value} for key, value in turned.items()}


# Keys that are constants in older releases of transformers.
NEW_KEYS = {"swiglu_alpha", "swiglu_limit"}


@functools.cache
def usual(family: str) -> dict[str, Changes]:
    """The changes above by name, but for those that the family's registration skips."""
    table = {**settings(family), **flags(family)}
    return {name: changes for name, changes in table.items() if not skipped(family, "variant", name)}


@functools.cache
def together(family: str) -> Changes:
    """The usual changes in one config, without other sizes: a value that is misread shows in it, too. Empty
    if the family refuses them together.
    """
    changes: Changes = {}
    for name, more in usual(family).items():
        if name not in OF_LAYERS:
            changes |= more
    return changes if accepts(family, changes) else {}


@functools.cache
def variants(family: str) -> dict[str, Changes]:
    """Changes by name: none, the ones above, and the family's registered variants."""
    architecture = find_architecture(family)
    own = {
        name: dict(changes)
        for name, changes in architecture.variants.items()
        if all(_is_read(architecture, key) for key in changes.keys() & NEW_KEYS)
    }
    return {"as_is": {}, **usual(family), **own}


def _is_read(architecture: Architecture, key: str) -> bool:
    """Whether the installed reference has the key in its config. False without the reference, too: where
    tests are collected, a skip would leave out the whole file.
    """
    try:
        return hasattr(config_class(architecture), key)
    except (ImportError, AttributeError):
        return False


def left_out(family: str) -> Iterator[tuple[str, Changes]]:
    """The tiny config without one of its keys, for each that the family can do without."""
    yield from _accepted(family, ABSENT, "absent")


def nulls(family: str) -> Iterator[tuple[str, Changes]]:
    """The tiny config with a null in place of a value, for each that the family can do without."""
    yield from _accepted(family, None, "null")


def _accepted(family: str, value: Any, what: str) -> Iterator[tuple[str, Changes]]:
    for key in find_architecture(family).tiny:
        # Refused configs cannot be compared.
        if key != "model_type" and not skipped(family, what, key) and accepts(family, {key: value}):
            yield key, {key: value}


def accepts(family: str, changes: Changes) -> bool:
    """Whether the family takes its tiny config with these changes."""
    try:
        spec_of(family, changes)
    except ConfigError:
        return False
    return True


# -- rope types


@functools.cache
def rope_types(family: str) -> dict[str, dict[str, Changes]]:
    """By name, then by spelling: the changes that give the family's layers this kind of rotation.

    Where rotary settings are nested by layer type, it is full attention that is scaled.
    """
    if not spec_of(family).ropes:
        return {}
    found = {}
    for name, (scaling, longest) in ROPES.items():
        if not skipped(family, "rope", name):
            found[name] = _spellings(family, scaling, longest)
    return found


def _spellings(family: str, scaling: Mapping[str, Any], longest: int) -> dict[str, Changes]:
    tiny = find_architecture(family).tiny
    none = {key: ABSENT for key in ROPE_KEYS if key in tiny}
    stated = tiny.get("rope_parameters") or {}
    full = {**tiny, **stated, **stated.get("full_attention", {})}
    kept = {key: full[key] for key in ("partial_rotary_factor", "llama_4_scaling_beta") if key in full}
    if "llama_4_scaling_beta" in kept:  # it applies beyond this length
        kept["original_max_position_embeddings"] = 16
    if scaling["rope_type"] == "longrope":
        half = max(rope.dim for rope in spec_of(family).ropes) // 2
        scaling = {
            **scaling,
            "short_factor": [1.0 + 0.03 * i for i in range(half)],
            "long_factor": [2.0 + 0.5 * i for i in range(half)],
        }
    new: Changes = {"rope_theta": THETA, **kept, **scaling}
    if "full_attention" in stated:
        new = {**stated, "full_attention": new}
    old = as_transformers_4({"rope_parameters": new}, find_architecture(family).rope_keys)
    length = {"max_position_embeddings": longest}
    if "original_max_position_embeddings" in tiny:  # it overrides the one of the rotary settings
        length["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings", longest)
    return {
        "rope_parameters": {**none, **length, "rope_parameters": new},
        "rope_scaling": {**none, **length, **old},
    }


def as_transformers_4(config: Mapping[str, Any], rope_keys: tuple[str, str]) -> Changes:
    """A config in the older spelling: rope_theta (named by `rope_keys`), rope_scaling, torch_dtype; also for
    the language model of a vision model. (The older spelling of encoders differs by family, or there is
    none.)
    """
    old = dict(config)
    if "text_config" in old:
        old["text_config"] = as_transformers_4(old["text_config"], rope_keys)
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    new = old.pop("rope_parameters", None)
    if not new:
        return old
    nested = any(isinstance(settings, Mapping) for settings in new.values())
    # Layers without positions, or of other types, of which the older spelling cannot tell.
    if new.get("full_attention", None if nested else new) is None:
        return {**old, "rope_parameters": new}
    full = dict(new.get("full_attention", new))
    for key, older in zip(("rope_theta", "partial_rotary_factor"), rope_keys, strict=True):
        if key in full:
            old[older] = full.pop(key)
    plain = full.keys() <= {"rope_type"} and full.get("rope_type", "default") == "default"
    old["rope_scaling"] = None if plain else full
    if "sliding_attention" in new:
        old["rope_local_base_freq"] = new["sliding_attention"]["rope_theta"]
    return old


def first_that_rotates_like(family: str, among: Iterable[str] | None = None) -> str:
    """The first family whose token mixers rotate in the same way and that accepts the same rope types."""
    others = list_architectures() if among is None else among
    return next(other for other in others if rotation(other) == rotation(family))


@functools.cache
def rotation(family: str) -> tuple[frozenset[Any], frozenset[str]]:
    """How a family's token mixers rotate, and the rope types that it accepts."""
    turned = {
        (type(mixer), rope.interleaved, rope.turning is None)
        for block in spec_of(family).blocks
        for mixer in block.mixers
        for rope in mixer.ropes
    }
    return frozenset(turned), frozenset(rope_types(family))


# -- keys without an effect

# Keys that all families read in the same way, tested where they are read.
READ_BY_ALL = {
    "model_type": "names the family",
    "pad_token_id": "concerns the gradient of one row alone: test_parity.py",
    "initializer_range": "concerns only fresh weights",
    "partial_rotary_factor": "families that turn whole heads refuse it",
    "max_position_embeddings": "without it there is no model",
    "original_max_position_embeddings": "is also part of the rotary settings",
}


def untried_keys(family: str) -> set[str]:
    """The keys that the family reads but that have no effect in any of its configs, except those that its
    registration skips.
    """
    skip = find_architecture(family).skip
    found = keys_without_effect(family) - {"is_causal"}  # read for all families alike: test_bidirectional.py
    found = {key for key in found if "drop" not in key}  # acts in training alone: test_dropout.py
    return {key for key in found if f"key:{key}" not in skip}


@functools.cache
def keys_without_effect(family: str) -> frozenset[str]:
    architecture = find_architecture(family)
    configs = [changed(architecture.tiny, changes) for changes in variants(family).values()]
    configs += [
        changed(architecture.tiny, changes)
        for spellings in rope_types(family).values()
        for changes in spellings.values()
    ]
    read, tried = set(), set()
    for raw in configs:
        config = HFConfig.load(raw)
        spec = architecture.spec(config)
        read |= config.taken
        for key in raw.keys() & config.taken - tried:
            rest = {name: value for name, value in raw.items() if name != key}
            try:
                without = architecture.spec(HFConfig.load(rest))
            except ConfigError:
                without = None
            if without != spec:
                tried.add(key)
    return frozenset(read - tried - READ_BY_ALL.keys())
