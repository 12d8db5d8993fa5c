"""Rotary settings, and scaling of queries by position."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import QueryScaleSpec, RopeSpec


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
    text_of_images: bool = False,
    dim: int | None = None,
) -> RopeSpec:
    """Rotary settings, in either spelling of the config.

    Args:
        layer_type: for families with different rotary settings per layer type.
        partial: default fraction of a head that is rotated; None: always whole heads.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + dim / 2).
        theta, scaling: defaults.
        local_theta: default theta of sliding layers, if different from the others'.
        extra: see `HFConfig.take_rope`; these values do not enter the tables.
        text_of_images: the language model of a vision-language model; text has the same position on all axes.
        dim: the number of rotated dimensions, if it follows from no stated fraction.
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
    if text_of_images:
        settings.pop("mrope_section", None)
    if "mrope_section" in settings:
        raise ConfigError(
            f"{c.name}: mrope_section asks for rotary positions on several axes, which {c.model_type!r} "
            "models do not have"
        )
    share = settings.pop("partial_rotary_factor")
    if settings["rope_type"] == "proportional":  # the first of a whole head's pairs are rotated
        factor = settings.pop("factor")
        settings |= {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        settings["turning"], share = int(share * head_dim // 2), 1.0
    if partial is None and share != 1:  # the references always rotate whole heads
        raise ConfigError(
            f"{c.name}: partial_rotary_factor is {share}, but {c.model_type!r} models rotate "
            "whole heads; remove it"
        )
    dim = int(head_dim * share) if dim is None else dim
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


def has_positions(c: HFConfig) -> bool:
    """Whether a config has rotary positions: not if it states a theta of null."""
    for settings in (c.take("rope_parameters", None), c.take("rope_scaling", None), c.raw):
        if isinstance(settings, Mapping) and "rope_theta" in settings:
            c.take("rope_theta", None)
            c.take_count("max_position_embeddings")
            return settings["rope_theta"] is not None
    return True


def longrope_alone(c: HFConfig, rope: RopeSpec | None) -> RopeSpec:
    """Rotary settings of a family with longrope or the default type.

    Raises:
        ConfigError: another type.
    """
    if rope is None or rope.type not in ("default", "longrope"):
        found = None if rope is None else rope.type
        raise ConfigError(
            f"{c.name}: {c.model_type} models have the rope type longrope or default, found {found}"
        )
    return rope


def local_rope(c: HFConfig, head_dim: int) -> RopeSpec:
    """Rotary settings of sliding layers with their own theta (Gemma 3)."""
    local = rope(c, head_dim, layer_type="sliding_attention", local_theta=1e4)
    return replace(local, max_position_embeddings=None)  # distances never exceed the window


def turning_layers(c: HFConfig) -> list[bool]:
    """Whether each layer applies rotary positions: `no_rope_layers`, despite its name, has a 1 for these; by
    default all but every `no_rope_layer_interval`-th do.

    Raises:
        ConfigError: it does not match the layers.
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


GROWING_QUERIES = ("llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings")
"""Keys of query scaling among rotary settings: `extra` of `rope`. The last is an alternative name."""


def query_scale(c: HFConfig, scaling: Mapping[str, Any]) -> QueryScaleSpec:
    """Scaling of queries by position, from the rotary settings; `scaling` as in `rope`.

    Raises:
        ConfigError: the settings are missing.
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
