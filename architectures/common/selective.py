"""Layers of Mamba's selective scan, under the names of keys that each family gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_models.architectures.common.mlps import activation
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import SelectiveSpec

WIDEST_STATE = 256  # of the scan's kernels


def selective(c: HFConfig, channels: int, keys: Mapping[str, str], **settings: Any) -> SelectiveSpec:
    """The mixer of Mamba.

    Args:
        keys: of the config, by fields of the spec and "activation". A rank of "auto", or none, is a sixteenth
            of the hidden size, rounded up.
        settings: other fields of the spec.

    Raises:
        ConfigError: sizes that the convolution or the scan do not support; an activation other than SiLU.
    """
    state, conv = c.take_count(keys["state"]), c.take_count(keys["conv"])
    if state > WIDEST_STATE:
        raise ConfigError(f"{c.name}: {keys['state']} is {state}; expected at most {WIDEST_STATE}")
    if not 2 <= conv <= 8:
        raise ConfigError(f"{c.name}: {keys['conv']} is {conv}; expected 2 to 8")
    if activation(c, keys["activation"]) != "silu":
        raise ConfigError(
            f"{c.name}: {keys['activation']} is {c.take(keys['activation'])!r}; the convolutions of state "
            "space layers have only 'silu'"
        )
    rank = c.take(keys["step_rank"], "auto")
    return SelectiveSpec(
        channels=channels,
        state=state,
        step_rank=-(-c.take_count("hidden_size") // 16)
        if rank == "auto"
        else c.take_count(keys["step_rank"]),
        conv=conv,
        conv_bias=c.take_flag(keys["conv_bias"], False),
        bias=c.take_flag(keys["bias"], False),
        **settings,
    )
