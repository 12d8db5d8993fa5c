"""Whole models, from the keys of nearly every config: sizes, types of layers, padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, NormSpec


def decoder(
    c: HFConfig, blocks: Sequence[BlockSpec], norm: NormSpec | LayerNormSpec, **settings: Any
) -> ModelSpec:
    """A model of these blocks, with its other settings from common keys. `settings` are other fields of the
    `ModelSpec`.
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


def padding_row(c: HFConfig) -> int | None:
    """Embedding row of the padding id; negative ids count from the end, as in the references.

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


def by_layer(c: HFConfig, key: str, usual: float | Sequence[float], *, whole: bool = False) -> list[Any]:
    """A number for each layer, from the config's list `key`. The default is `usual`: one number for all, or
    one for each. With `whole` they are integers from 1, else any numbers from 0.

    Raises:
        ConfigError: not one such number per layer.
    """
    count = c.take_count("num_hidden_layers")
    found = c.take(key, list(usual) if isinstance(usual, Sequence) else [usual] * count)
    good = isinstance(found, list) and len(found) == count
    if not good or not all((type(n) is int and n > 0) if whole else (is_finite(n) and n >= 0) for n in found):
        expected = "a whole number of 1 or more" if whole else "a finite number of 0 or more"
        raise ConfigError(
            f"{c.name}: {key} must be a list with {expected} for each of the {count} layers, found "
            f"{abbreviate(found)}"
        )
    return found


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Types of layers."""


def layer_types(
    c: HFConfig, default: Callable[[int], str], known: Sequence[str], key: str = "layer_types"
) -> list[str]:
    """Type of each layer, from the config's `key`, or by default `default(layer)`.

    Raises:
        ConfigError: not one type per layer, or types other than `known`.
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
