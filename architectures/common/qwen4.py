"""Embeddings of n-grams, the constants of their hashes, and indexers, from the keys of Qwen4's configs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import AttentionSpec, NgramSpec, PooledIndexerSpec

_BITS = (1 << 64) - 1


def indexed(c: HFConfig, attention: AttentionSpec) -> AttentionSpec:
    """Attention with an indexer.

    Raises:
        ConfigError: a budget that blocks do not divide, or an indexer narrower than what is rotated.
    """
    names = "n_heads", "head_dim", "compress_ratio", "budget"
    heads, dim, size, budget = (c.take_count(f"indexer_{name}") for name in names)
    turned = attention.rope.dim if attention.rope else 0
    if budget % size or dim < turned:
        raise ConfigError(
            f"{c.name}: found indexer_budget {budget}, indexer_compress_ratio {size} and indexer_head_dim "
            f"{dim}; expected a multiple of the ratio, and at least {turned} dimensions, which are rotated"
        )
    return replace(attention, indexer=PooledIndexerSpec(heads, dim, size, budget // size))


def ngrams(c: HFConfig, possible: Sequence[bool]) -> dict[int, NgramSpec]:
    """The n-grams of each layer that has them: `ple_layer_ids` numbers layers from 1. `possible` says which
    layers may have them.

    Raises:
        ConfigError: numbers of no such layers, sizes that do not divide, or no id of the end of a text.
    """
    ids, among = c.take("ple_layer_ids", []), [n for n, may in enumerate(possible, 1) if may]
    if not isinstance(ids, list) or not all(type(n) is int and n in among for n in ids):
        raise ConfigError(
            f"{c.name}: ple_layer_ids must be a list of layers with linear attention, of {abbreviate(among)} "
            f"(from 1 on), found {abbreviate(ids)}"
        )
    size, heads = c.take_count("ngram_size", 3), c.take_count("heads_per_ngram", 8)
    width = c.take_count("ple_embed_dim", c.take_count("hidden_size"))
    base, multiple = (
        c.take_count("ngram_vocab_size_base"),
        c.take_count("make_ngram_vocab_size_divisible_by"),
    )
    pieces, conv = c.take_count("split_ngram_parts"), c.take_count("ple_conv_kernel_size", 4)
    seed, eos = c.take_count("seed", least=0), c.take("eos_token_id", None)
    eos = eos[0] if isinstance(eos, list) and eos else eos
    found: dict[int, NgramSpec] = {}
    for nth, number in enumerate(sorted(set(ids))):
        tables = (size - 1) * heads
        if size < 2 or width % tables or not 2 <= conv <= 8 or type(eos) is not int:
            raise ConfigError(
                f"{c.name}: found ngram_size {size}, heads_per_ngram {heads}, ple_embed_dim {width}, "
                f"ple_conv_kernel_size {conv} and eos_token_id {eos}; expected n-grams of 2 or more, a width "
                "that their heads divide, a convolution of 2 to 8 taps, and an id"
            )
        sizes = _primes(base, nth * tables, tables)
        rows = -(-sum(sizes) // multiple) * multiple
        if rows % pieces:
            raise ConfigError(
                f"{c.name}: split_ngram_parts is {pieces}, which does not divide the {rows} rows of a table; "
                "set it to a divisor (make_ngram_vocab_size_divisible_by makes rows a multiple)"
            )
        factors = _factors(c.take_count("vocab_size"), size, nth, seed)
        found[number - 1] = NgramSpec(size, heads, width, eos, sizes, factors, rows, conv, pieces)
    return found


@functools.cache
def _primes(least: int, skipped: int, count: int) -> tuple[int, ...]:
    """The next `count` primes from `least` on, after `skipped` of them."""
    found: list[int] = []
    number = least
    while len(found) < skipped + count:
        if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found[skipped:])


def _factors(vocab_size: int, size: int, nth: int, seed: int) -> tuple[int, ...]:
    """Odd numbers, by which an id is multiplied without overflow: from SplitMix64 (Steele et al., 2014)."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    step = 0x9E3779B97F4A7C15
    found = []
    for n in range(1, size + 1):
        x = (seed + 10007 * nth + step * n + step) & _BITS
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
        found.append(2 * ((x ^ (x >> 31)) % bound) + 1)
    return tuple(found)
