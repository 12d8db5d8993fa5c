"""Rotary settings of config.json, in the old and the new spelling.

Old: `rope_theta`, `rope_scaling` and `partial_rotary_factor` at the top level. New: one object,
`rope_parameters`, which may be nested by layer type.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, TypeGuard

from liger_models.convert.errors import ConfigError, abbreviate

_RopeFields = dict[str, tuple[type, ...]]
_NUMBER: tuple[type, ...] = (int, float)
_LIST: tuple[type, ...] = (list, tuple)
_KIND_NAMES = {
    _NUMBER: "a number",
    _LIST: "a list of numbers",
    (int,): "an integer",
    (bool,): "true or false",
}

# Required and optional parameters of each type, with the names and defaults of published configs. A default
# of None is computed by the rope type's formula.
_ROPE_TYPES: dict[str, tuple[_RopeFields, dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": ({"factor": _NUMBER}, {}),
    "proportional": ({}, {"factor": 1.0}),
    "dynamic": ({"factor": _NUMBER, "original_max_position_embeddings": (int,)}, {}),
    "yarn": (
        {"factor": _NUMBER, "original_max_position_embeddings": (int,)},
        {
            "attention_factor": None,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": None,
            "mscale_all_dim": None,
            "truncate": True,
        },
    ),
    "longrope": (
        {
            "factor": _NUMBER,
            "original_max_position_embeddings": (int,),
            "short_factor": _LIST,
            "long_factor": _LIST,
        },
        {"attention_factor": None},
    ),
    "llama3": (
        {
            "factor": _NUMBER,
            "original_max_position_embeddings": (int,),
            "low_freq_factor": _NUMBER,
            "high_freq_factor": _NUMBER,
        },
        {},
    ),
}
_ROPE_ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""The usual names of both at the top level. In `rope_parameters` every family has these."""
_NO_EFFECT = frozenset({"finetuned"})
_SCALING = frozenset(key for fields in _ROPE_TYPES.values() for kind in fields for key in kind)
_SHARES = frozenset({"partial_rotary_factor"})
# Divisors of frequencies and lengths, and arguments of logarithms.
_POSITIVE = frozenset({"rope_theta", "factor", "original_max_position_embeddings"})


class Keys(Protocol):
    """Config interface used here; `HFConfig` implements it."""

    name: str
    model_type: str
    raw: dict[str, Any]
    complete: bool
    rope_keys: tuple[str, str]

    def take(self, key: str, default: Any = ...) -> Any: ...

    def take_count(self, key: str, default: Any = ...) -> Any: ...

    def take_one_of(self, *keys: str, default: Any = ...) -> Any: ...


def read_rope(
    c: Keys,
    layer_type: str | None,
    default_theta: float,
    default_partial: float,
    default_scaling: Mapping[str, Any],
    default_local_theta: float | None,
    extra: Collection[str],
) -> dict[str, Any]:
    """Read the rotary settings of a config in one form; see `HFConfig.take_rope` for results and errors."""
    theta, partial = (_stated(c, *names) for names in zip(c.rope_keys, ROPE_KEYS, strict=True))
    scaling = c.take("rope_scaling", None)
    new = c.take("rope_parameters", None)
    if layer_type is not None:
        local_theta = c.take("rope_local_base_freq", None)
        if layer_type == "sliding_attention":
            if default_local_theta is not None:
                theta, default_theta, partial = local_theta, default_local_theta, None
            elif local_theta is not None:
                theta = local_theta
            scaling = None

    _check_object(c, "rope_scaling", scaling)
    _check_object(c, "rope_parameters", new)
    by_layer_type = is_nested(new)
    if by_layer_type:
        if layer_type is None:
            raise ConfigError(
                f"{c.name}: rope_parameters is nested by layer type ({', '.join(new)}), but every layer of a "
                f"{c.model_type!r} model rotates alike; expected one flat object"
            )
        if new.get(layer_type) is None:
            raise ConfigError(f"{c.name}: rope_parameters has no entry for the layer type {layer_type!r}")
        new = new[layer_type]
        _check_object(c, f"{layer_type} of rope_parameters", new)

    settings = new or scaling or {}
    if theta is None:
        _refuse_lost(c, "rope_theta", settings, default_theta)
    if partial is None and default_partial != 1.0:
        _refuse_lost(c, "partial_rotary_factor", settings, default_partial)
    defaults = {
        "rope_theta": default_theta if theta is None else theta,
        "partial_rotary_factor": default_partial if partial is None else partial,
    }
    if new is None or (not new and scaling):
        return _normalise(c, "rope_scaling", scaling or default_scaling, defaults, extra)

    result = _normalise(c, "rope_parameters", new, defaults, extra)
    stated = {}
    for key, value in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if value is not None:
            stated[key] = float(_checked(c, "the top level", key, value, _NUMBER))
    if "rope_scaling" in c.raw and not (by_layer_type and c.raw["rope_scaling"] is None):  # TranslateGemma
        inherited = {**_pick(result, defaults), **stated}
        stated = _normalise(c, "rope_scaling", scaling or {}, inherited, extra)
    differing = sorted(key for key in stated if stated[key] != result.get(key))
    if differing:
        pairs = ", ".join(f"{key} is {stated[key]!r} and {result.get(key)!r}" for key in differing)
        raise ConfigError(
            f"{c.name}: the old spelling (rope_theta, rope_scaling) and the new one (rope_parameters) "
            f"describe different models: {pairs}; remove the one that is wrong"
        )
    return result


def _stated(c: Keys, own: str, usual: str) -> Any:
    """Return the value under the family's own name of a key. The usual name may repeat it with an equal
    value. Alone it would be ignored by the reference, so it is left for `finish` to refuse.
    """
    return c.take_one_of(*dict.fromkeys((own, usual) if own in c.raw else (own,)), default=None)


def _refuse_lost(c: Keys, key: str, settings: Mapping[str, Any], default: float) -> None:
    """Refuse rotary settings that replaced the checkpoint's own but lack `key`: the checkpoint was probably
    not trained with the family's default. A null is refused too: the references cannot run with it.
    """
    null = key in settings or c.raw.get(key, default) is None
    if settings.get(key) is None and (c.complete or null):
        raise ConfigError(
            f"{c.name}: the rotary settings {abbreviate(dict(settings))} have no {key}; expected a number, "
            f"and the default of {c.model_type!r}, {default:g}, may not be the checkpoint's. Settings given "
            f"to from_pretrained replace all of the checkpoint's: repeat its {key} among them, as in "
            f"rope_parameters={{..., {key!r}: ...}}"
        )


def both_rope_spellings(raw: Mapping[str, Any], names: tuple[str, str] = ROPE_KEYS) -> dict[str, Any]:
    """Return the keys that make `raw` readable in both spellings; {} if it has no rotary settings.
    `names` belong to the old spelling.
    """
    new = raw.get("rope_parameters")
    if is_nested(new):
        full, sliding = new.get("full_attention"), new.get("sliding_attention")
        types = [of_type for of_type in (full, sliding) if of_type]
        if any("partial_rotary_factor" in of_type for of_type in types):
            return {}  # the old spelling cannot express one layer type alone
        if any(of_type.get("rope_type") == "proportional" for of_type in types):
            return {}  # unknown to the old spelling, whose readers would fail on it
        old = _old_rope_spelling(full, names) if full else {}
        return {**old, "rope_local_base_freq": sliding["rope_theta"]} if sliding else old
    if new:
        return _old_rope_spelling(new, names)
    scaling = dict(raw.get("rope_scaling") or {})
    if names[0] not in raw and not scaling:
        return {}
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type", "default"))
    stated = {usual: raw[own] for usual, own in zip(ROPE_KEYS, names, strict=True) if own in raw}
    return {"rope_parameters": {**scaling, **stated}}


def _old_rope_spelling(new: Mapping[str, Any], names: tuple[str, str]) -> dict[str, Any]:
    outside = {own: new[usual] for usual, own in zip(ROPE_KEYS, names, strict=True) if usual in new}
    scaling = {key: value for key, value in new.items() if key not in ROPE_KEYS}
    plain = scaling.keys() <= {"rope_type"} and scaling.get("rope_type", "default") == "default"
    # Without a null for a plain type: transformers may take it in place of rope_parameters.
    return outside if plain else {**outside, "rope_scaling": scaling}


def _normalise(
    c: Keys,
    where: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    extra: Collection[str],
) -> dict[str, Any]:
    """Complete and check rotary settings as one flat dict. `defaults` are values from outside `settings`;
    `extra` are the family's numbers in addition to the type's.
    """
    rest = {key: value for key, value in settings.items() if value is not None}
    named = {str(rest.pop(key)) for key in ("rope_type", "type") if key in rest}
    rope_type = _type_of(c, where, named)
    required, optional = _ROPE_TYPES[rope_type]

    out: dict[str, Any] = {"rope_type": rope_type}
    for key, default in defaults.items():
        out[key] = float(_checked(c, where, key, rest.pop(key, default), _NUMBER))
    if "mrope_section" in rest:
        out["mrope_section"] = tuple(_checked(c, where, "mrope_section", rest.pop("mrope_section"), _LIST))
        _checked(c, where, "mrope_interleaved", rest.pop("mrope_interleaved", False), (bool,))
    if "original_max_position_embeddings" in required:
        rest["original_max_position_embeddings"] = _original_length(c, where, rope_type, rest)
    if rope_type in ("longrope", "yarn") and "factor" not in rest:
        # Both papers define the factor as this ratio; some released configs give only the two lengths.
        original = rest["original_max_position_embeddings"]
        _checked(c, where, "original_max_position_embeddings", original, (int,))
        rest["factor"] = c.take_count("max_position_embeddings") / original

    for key, kinds in required.items():
        if key not in rest:
            raise ConfigError(f"{c.name}: {where} of type {rope_type!r} lacks {key!r}")
        out[key] = _plain(_checked(c, where, key, rest.pop(key), kinds))
    for key, default in optional.items():
        value = rest.pop(key, default)
        if value is not None:
            value = _plain(_checked(c, where, key, value, (bool,) if isinstance(default, bool) else _NUMBER))
        out[key] = value
    if rope_type == "longrope" and out["factor"] > 1 and out["attention_factor"] == out["factor"]:
        raise ConfigError(
            f"{c.name}: {where} has attention_factor {out['factor']:g}, equal to the factor by which the "
            "context grows, and queries and keys would both be scaled by it; some exports of Phi-3.5 write "
            "this by mistake. Remove attention_factor, or set it to null: the paper's formula, "
            "sqrt(1 + log(factor) / log(original_max_position_embeddings)), then gives it"
        )
    if extra:
        given = [key for key in extra if key in rest]
        out["extra"] = {key: _checked(c, where, key, rest.pop(key), _NUMBER) for key in given}
    if not (unknown := sorted(set(rest) - _NO_EFFECT)):
        return out
    if not named or rope_type != "default" or not all(key in _SCALING for key in unknown):
        raise ConfigError(
            f"{c.name}: {where} of type {rope_type!r} has the unknown key{'s' * (len(unknown) > 1)} "
            f"{', '.join(map(repr, unknown))}; known are {', '.join([*required, *optional, *defaults])}"
        )
    warnings.warn(
        f"{c.name}: {where} of type 'default' does not scale, so {', '.join(unknown)} have no effect",
        stacklevel=2,
    )
    return out


def _type_of(c: Keys, where: str, named: Collection[str]) -> str:
    """The rope type, under its own name, of settings in which these are `named`."""
    types = {_ROPE_ALIASES.get(name, name) for name in named or ("default",)}
    if len(types) > 1:
        raise ConfigError(f"{c.name}: {where} names two rope types, {' and '.join(sorted(named))}")
    rope_type = types.pop()
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(
            f"{c.name}: {where} has the unknown rope type {abbreviate(rope_type)}; known are "
            f"{', '.join(sorted(_ROPE_TYPES))}"
        )
    return rope_type


def _original_length(c: Keys, where: str, rope_type: str, rest: Mapping[str, Any]) -> Any:
    """Return the context length before scaling: at the top level, or inside, else the model's own."""
    inside = rest.get("original_max_position_embeddings")
    if rope_type == "dynamic":  # scaling starts at the model's own length, whatever else is given
        length = c.take_count("max_position_embeddings")
        if inside not in (None, length):
            raise ConfigError(
                f"{c.name}: {where} of type 'dynamic' has original_max_position_embeddings "
                f"{abbreviate(inside)}, but this type scales beyond max_position_embeddings, {length}; "
                "remove it"
            )
        return length
    top = c.take("original_max_position_embeddings", None)
    if top is not None:
        return top
    return c.take_count("max_position_embeddings") if inside is None else inside


def _checked(c: Keys, where: str, key: str, value: Any, kinds: tuple[type, ...]) -> Any:
    right = isinstance(value, kinds)
    if kinds != (bool,):
        numbers: Iterable[Any] = value if right and kinds is _LIST else [value]
        right = right and all(is_finite(n) for n in numbers)
    if not right:
        expected = _KIND_NAMES[kinds]
        raise ConfigError(f"{c.name}: {key} of {where} must be {expected}, found {abbreviate(value)}")
    if kinds in (_NUMBER, (int,)) and value < 0:
        raise ConfigError(f"{c.name}: {key} of {where} must not be negative, found {abbreviate(value)}")
    if key in _SHARES and value > 1:
        raise ConfigError(f"{c.name}: {key} of {where} must be at most 1, found {abbreviate(value)}")
    if key in _POSITIVE and value == 0:
        raise ConfigError(f"{c.name}: {key} of {where} must be above 0")
    return value


def is_finite(value: Any) -> bool:
    """Return whether this is a number below 2^63, the limit of torch's integers."""
    return type(value) in (int, float) and abs(value) < 2**63


def _check_object(c: Keys, where: str, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{c.name}: {where} must be an object or null, found {abbreviate(value)}")


def _plain(value: Any) -> Any:
    return tuple(float(x) for x in value) if isinstance(value, (list, tuple)) else value


def is_nested(rope: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether these rope_parameters have one entry per layer type."""
    return isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values())


def _pick(mapping: Mapping[str, Any], keys: Any) -> dict[str, Any]:
    return {key: mapping[key] for key in keys if key in mapping}
