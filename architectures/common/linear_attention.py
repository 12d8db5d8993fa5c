"""Hybrid models: linear attention in some layers, and attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liger_models.architectures.common.mlps import activation
from liger_models.architectures.common.model import FULL, layer_types
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, GatedDeltaSpec
from liger_models.layers.specs.recurrent import Projections

LINEAR = "linear_attention"


def gated_delta(
    c: HFConfig,
    projections: Projections,
    norm_eps: float,
    *,
    sizes: tuple[int, int, int, int] | None = None,
    **settings: Any,
) -> GatedDeltaSpec:
    """The gated delta rule, from the keys shared by all its families.

    Args:
        sizes: numbers of key heads and value heads, and their widths. Default: the config's.
        settings: other fields of the spec.

    Raises:
        ConfigError: value heads are not a multiple of key heads, or an activation other than SiLU.
    """
    named = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_dim, value_dim = sizes or map(c.take_count, named)
    if values % keys:
        raise ConfigError(
            f"{c.name}: linear_num_value_heads is {values} and linear_num_key_heads {keys}; "
            "the first must be a multiple of the second"
        )
    width = c.take_count("linear_conv_kernel_dim")
    check_convolution(c, width, "linear_conv_kernel_dim")
    return GatedDeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=width,
        norm_eps=norm_eps,
        projections=projections,
        **settings,
    )


def check_convolution(c: HFConfig, width: int, key: str) -> None:
    """Check the convolution of linear attention.

    Raises:
        ConfigError: an unsupported width, which `key` gives, or an activation other than SiLU.
    """
    if activation(c) != "silu":
        raise ConfigError(
            f"{c.name}: hidden_act is {c.take('hidden_act')!r}; the convolutions of linear attention have "
            "only 'silu'"
        )
    if not 2 <= width <= 8:
        raise ConfigError(f"{c.name}: {key} is {width}; expected 2 to 8")


def mixers(
    c: HFConfig, linear: GatedDeltaSpec, attention: AttentionSpec, names: Sequence[str] = (FULL,)
) -> Sequence[AttentionSpec | GatedDeltaSpec]:
    """The mixer of each layer by `layer_types`, where attention has any of these names; where the config has
    none, attention in every `full_attention_interval`-th.
    """
    interval = c.take_count("full_attention_interval", 4)
    types = layer_types(c, lambda i: LINEAR if (i + 1) % interval else names[0], (LINEAR, *names))
    return [linear if kind == LINEAR else attention for kind in types]
