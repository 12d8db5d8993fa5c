"""State space layers of Mamba 2, under the names of keys that each family gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from liger_models.architectures.common.linear_attention import LINEAR
from liger_models.architectures.common.mlps import activation
from liger_models.architectures.common.model import FULL
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import Fresh, SSDSpec, StepBiases, Uniform

MAMBA_KEYS: Mapping[str, str] = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "conv": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "activation": "hidden_act",
}
"""Keys of Bamba, by fields of the spec; later hybrid models have the same."""


def ssd(
    c: HFConfig, size: int, norm_eps: float, keys: Mapping[str, str] = MAMBA_KEYS, **settings: Any
) -> SSDSpec:
    """The mixer of Mamba 2.

    Args:
        size: channels of all heads; the config's number of heads and their width must agree. A width of
            "auto", or none, follows from it.
        norm_eps: of the norm of the output.
        keys: of the config, by fields of the spec and "activation". Without "conv_bias" the convolution has a
            bias; without "activation" the reference reads none.
        settings: other fields of the spec.

    Raises:
        ConfigError: heads that do not have `size` channels, or that are not a multiple of the groups; an
            activation other than SiLU.
    """
    heads, groups, conv = (c.take_count(keys[name]) for name in ("heads", "groups", "conv"))
    width = c.take(keys["head_dim"], "auto")
    width = size // heads if width == "auto" else c.take_count(keys["head_dim"])
    if heads * width != size:
        raise ConfigError(
            f"{c.name}: {keys['heads']} is {heads} and {keys['head_dim']} {width}; "
            f"expected {size} channels, as many as the config gives the state space layers"
        )
    if heads % groups or size % groups:
        raise ConfigError(
            f"{c.name}: {keys['heads']} is {heads} and {keys['groups']} {groups}; "
            "the first must be a multiple of the second"
        )
    if "activation" in keys and activation(c, keys["activation"]) != "silu":
        raise ConfigError(
            f"{c.name}: {keys['activation']} is {c.take(keys['activation'])!r}; the convolutions of state "
            "space layers have only 'silu'"
        )
    if not 2 <= conv <= 8:
        raise ConfigError(f"{c.name}: {keys['conv']} is {conv}; expected 2 to 8")
    return SSDSpec(
        heads=heads,
        head_dim=width,
        groups=groups,
        state=c.take_count(keys["state"]),
        conv=conv,
        conv_bias="conv_bias" not in keys or c.take_flag(keys["conv_bias"], False),
        norm_eps=norm_eps,
        **{"bias": (bias := c.take_flag(keys["bias"], False)), "out_bias": bias, **settings},
    )


MLP, EXPERTS = "mlp", "moe"
"""Types of layers of one part, in addition to LINEAR and FULL."""

_TYPES = {LINEAR: LINEAR, "mamba": LINEAR, FULL: FULL, "attention": FULL}
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}


def hybrid_types(c: HFConfig, default: Callable[[int], str]) -> list[str]:
    """Type of each layer, LINEAR or FULL, under the names of older and newer configs.

    Args:
        default: type of a layer if the config has no types.

    Raises:
        ConfigError: not one type per layer, or an unknown type.
    """
    types = c.take_one_of("layer_types", "layers_block_type", default=None)
    if types is None:
        types = [default(i) for i in range(c.take_count("num_hidden_layers"))]
    return known_types(c, types, _TYPES)


def part_types(c: HFConfig) -> list[str]:
    """Type of each layer of one part: LINEAR, FULL, MLP or EXPERTS. The config has names, or letters, or
    neither, and then one layer of each type.

    Raises:
        ConfigError: an unknown type, or not as many as `num_hidden_layers`, where that is given.
    """
    types = c.take_one_of("layers_block_type", "layer_types", default=None)
    letters = c.take("hybrid_override_pattern", None)
    if types is None and isinstance(letters, str):
        return known_types(c, list(letters), _LETTERS)
    if types is None:
        types = [LINEAR, EXPERTS, FULL, MLP]
    return known_types(c, types, {**_TYPES, MLP: MLP, EXPERTS: EXPERTS})


def known_types(c: HFConfig, types: Any, names: Mapping[str, str]) -> list[str]:
    """Type of each layer, from the `types` of a config under their `names`.

    Raises:
        ConfigError: an unknown type, or not as many as `num_hidden_layers`, where that is given.
    """
    listed = types if isinstance(types, list) else []
    found = [names[kind] for kind in listed if isinstance(kind, str) and kind in names]
    count = c.take_count("num_hidden_layers", len(listed))
    if not found or not len(found) == len(listed) == count:
        raise ConfigError(
            f"{c.name}: the types of the {count} layers must be {', '.join(names)}, found {abbreviate(types)}"
        )
    return found


def step_biases(c: HFConfig, prefix: str = "time_step", floor: str = "floor") -> StepBiases:
    """Initial biases of time steps, from the config's bounds of fresh steps."""
    usual = StepBiases()
    return StepBiases(
        shortest=c.take_number(f"{prefix}_min", usual.shortest),
        longest=c.take_number(f"{prefix}_max", usual.longest),
        floor=c.take_number(f"{prefix}_{floor}", usual.floor),
    )


def fresh_mamba(c: HFConfig, channels: int) -> tuple[tuple[str, Fresh], ...]:
    """Initial weights of Mamba and Mamba 2, whose mixers have `channels`."""
    divisor = c.take_count("num_hidden_layers") if c.take_flag("rescale_prenorm_residual", False) else 1
    return (
        ("*.mamba.conv1d.weight", Uniform(c.take_count("conv_kernel") ** -0.5)),
        ("*.mamba.out_proj.weight", Uniform((channels * divisor) ** -0.5)),
        ("*.mamba.dt_bias", step_biases(c)),
    )


def time_step_limit(c: HFConfig, key: str = "time_step_limit") -> dict[str, Any]:
    """Bounds of the time step, as fields of the spec. An infinite one is written as Infinity, or as
    {"__float__": "Infinity"}.

    Raises:
        ConfigError: not two numbers in ascending order.
    """
    value = c.take(key, (0.0, math.inf))
    ends = [_number(end) for end in value] if isinstance(value, list | tuple) else []
    if len(ends) != 2 or not is_finite(ends[0]) or not (ends[1] == math.inf or is_finite(ends[1])):
        ends = []
    if not ends or ends[0] > ends[1]:
        raise ConfigError(
            f"{c.name}: {key} must be two numbers in ascending order (the second may be infinite), "
            f"found {abbreviate(value)}"
        )
    return {"dt_min": float(ends[0]), "dt_max": None if ends[1] == math.inf else float(ends[1])}


def _number(value: Any) -> Any:
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        value = value["__float__"]
    return math.inf if value in ("Infinity", "inf") else value
