"""Grouped-query attention: sizes, windows and chunks, keys shared among layers, and slopes of ALiBi (Press et
al., 2021, arXiv:2108.12409).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from liger_models.architectures.common.model import CHUNKED, FULL, SLIDING, layer_types
from liger_models.architectures.common.rotary import has_positions, rope
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    AttentionSpec,
    ConvolvedAttentionSpec,
    NormSpec,
    QueryScaleSpec,
    SharedAttentionSpec,
)


def attention(
    c: HFConfig,
    *,
    bias: bool = False,
    window: int | None = None,
    kv_heads: int | None = None,
    positions: bool = True,
    optional: bool = False,
    **rotary: Any,
) -> AttentionSpec:
    """Grouped-query attention with rotary positions, from the keys of nearly every config.

    Args:
        bias: of every projection.
        window: number of visible tokens.
        kv_heads: for families without the key `num_key_value_heads`.
        positions: False: without rotary positions, whose keys are not read.
        optional: without rotary positions if the config's theta is null (`has_positions`).
        rotary: options of `rope`.
    """
    heads = c.take_count("num_attention_heads")
    kv_heads = kv_heads or c.take_count("num_key_value_heads", heads)
    check_groups(c, heads, kv_heads)
    head_dim = head_size(c)
    return AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(c, head_dim, **rotary) if positions and (not optional or has_positions(c)) else None,
        window=window,
        qkv_bias=bias,
        o_bias=bias,
    )


def head_size(c: HFConfig) -> int:
    """Width of a head, from `head_dim`, or by dividing the width of hidden states.

    Raises:
        ConfigError: it does not divide.
    """
    hidden_size, heads = c.take_count("hidden_size"), c.take_count("num_attention_heads")
    head_dim = c.take_count("head_dim", None)
    if head_dim is None:
        if hidden_size % heads:
            raise ConfigError(
                f"{c.name}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{heads}; set head_dim"
            )
        head_dim = hidden_size // heads
    return int(head_dim)


def check_groups(c: HFConfig, heads: int, kv_heads: int) -> None:
    """Check that queries' heads are a multiple of the key/value heads.

    Raises:
        ConfigError: they are not.
    """
    if heads % kv_heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; "
            "the first must be a multiple of the second"
        )


def attention_as_wide_as_the_model(c: HFConfig, **settings: Any) -> AttentionSpec:
    """`attention` for families whose heads together have the width of the hidden state.

    Raises:
        ConfigError: `head_dim` contradicts that.
    """
    attn = attention(c, **settings)
    if attn.q_size != c.take_count("hidden_size"):
        raise ConfigError(
            f"{c.name}: {attn.num_attention_heads} heads of {attn.head_dim} dimensions are not as wide as "
            f"hidden_size, {c.take_count('hidden_size')}; in {c.model_type} models they are"
        )
    return attn


def windows(c: HFConfig, default: Callable[[int], str], *, off: bool = False) -> list[int | None]:
    """Window of each layer: `sliding_window` for layers of type sliding_attention, else None.

    Args:
        default: type of a layer if the config has no `layer_types`.
        off: windows are switched off in the config.

    Raises:
        ConfigError: an unknown type, or sliding layers without a window.
    """
    types = layer_types(c, default, (FULL, SLIDING))
    c.take("sliding_window", None)  # some references write 0 to switch windows off
    window = None if off else c.take_count("sliding_window", None)
    if SLIDING in types and window is None:
        raise ConfigError(
            f"{c.name}: some layers are of type {SLIDING}, but sliding_window is missing or switched off"
        )
    return [window if kind == SLIDING else None for kind in types]


def chunks(c: HFConfig, default: Callable[[int], str]) -> list[int | None]:
    """Chunk size of each layer: `attention_chunk_size` for layers of type chunked_attention, else None.

    Args:
        default: type of a layer if the config has no `layer_types`.

    Raises:
        ConfigError: an unknown type, or chunked layers without a size.
    """
    types, size = layer_types(c, default, (FULL, CHUNKED)), c.take_count("attention_chunk_size", None)
    if CHUNKED in types and size is None:
        raise ConfigError(f"{c.name}: some layers are of type {CHUNKED}, but attention_chunk_size is missing")
    return [size if kind == CHUNKED else None for kind in types]


def layer_sizes(c: HFConfig, keys: Collection[str]) -> list[dict[str, Any]] | None:
    """Overrides of the model's sizes per layer, from `per_layer_config`; None if the config has none. `keys`
    are the allowed ones.

    Raises:
        ConfigError: not such a table.
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
    """Reuse keys and values in the last `num_kv_shared_layers` layers: those of the last earlier layer with
    the same window.

    Raises:
        ConfigError: there is no such layer, or its heads differ.
    """
    first = len(mixers) - c.take_count("num_kv_shared_layers", 0, least=0)
    own = {mixer.window: i for i, mixer in enumerate(mixers[: max(first, 0)])}

    def reading(attn: AttentionSpec) -> SharedAttentionSpec:
        source = own.get(attn.window)
        sizes = attn.num_key_value_heads, attn.head_dim
        if source is None or sizes != (mixers[source].num_key_value_heads, mixers[source].head_dim):
            raise ConfigError(
                f"{c.name}: num_kv_shared_layers is {len(mixers) - first}; expected an earlier layer of each "
                "type among them, with heads of the same number and size"
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
    """Patterns of the unused key and value tensors of layers that reuse others'."""
    last, shared = c.take_count("num_hidden_layers"), c.take_count("num_kv_shared_layers", 0, least=0)
    parts = ("k_proj", "v_proj", "k_norm")
    layers = range(max(last - shared, 0), last)
    return tuple(f"model.layers.{i}.self_attn.{part}.*" for i in layers for part in parts)


def alibi_slopes(heads: int, steepest: float = 8.0, *, interleaved: bool = False) -> tuple[float, ...]:
    """Slopes of all heads, in float32 as the references compute them: 2^(-8 i / heads), i from 1.

    For a number of heads that is not a power of two, heads take the slopes of the next lower power, then
    every other slope of twice that power. `interleaved`: the slopes of the next higher power, every other one
    first (MPT). `steepest` replaces the 8.
    """
    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return _geometric(heads, steepest)
    doubled = _geometric(2 * power, steepest)
    if interleaved:
        return (*doubled[1::2], *doubled[::2])[:heads]
    return (*_geometric(power, steepest), *doubled[::2][: heads - power])


def _geometric(count: int, steepest: float) -> tuple[float, ...]:
    exponents = torch.arange(1, count + 1, dtype=torch.float32, device="cpu") * (steepest / count)
    return tuple(torch.pow(2.0, -exponents).tolist())


CONVOLVED = "hybrid", "hybrid_sliding"
"""Types of layers with convolved attention, without a window and with one."""


def convolved_attention(c: HFConfig, kind: str, norm: NormSpec) -> ConvolvedAttentionSpec:
    """The attention of layers of a type; those with a window have sizes of their own."""
    prefix = "swa_" if kind == CONVOLVED[1] else ""
    heads, kv_heads = (c.take_count(f"{prefix}num_{name}_heads") for name in ("attention", "key_value"))
    check_groups(c, heads, kv_heads)
    dim, window = c.take_count(f"{prefix}head_dim", 128), c.take_count("sliding_window_size", 512)
    floor, alpha = c.take_count("log_scaling_n_floor", None), c.take_number("log_scaling_alpha", 0.1)
    extent = c.take_count("rel_extent", 1024)
    return ConvolvedAttentionSpec(
        *(heads, kv_heads, dim, 1 / dim, norm),
        extent=window if prefix else extent,
        distance_dim=c.take_count("d_rel", 16),
        conv=c.take_count("conv_kernel_size", 4),
        window=window if prefix else None,
        query_scale=None if prefix or floor is None else QueryScaleSpec(alpha, floor, first=1, late=True),
    )
