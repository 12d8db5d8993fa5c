"""A model's config after reading: attribute access for users, and export."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from liger_models.convert.config.rope_config import ROPE_KEYS, both_rope_spellings


class ModelConfig:
    """The keys of config.json as attributes that can be set.

    Other libraries read and set attributes of `model.config` (`use_cache`, `hidden_size`) and call the
    methods below. Changing a size here does not rebuild the model.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self.__dict__.update(copy.deepcopy(dict(raw)))

    def to_dict(self) -> dict[str, Any]:
        """Copy of the keys and values."""
        return copy.deepcopy(self.__dict__)

    def to_json_string(self) -> str:
        """The keys and values as JSON."""
        return json.dumps(self.__dict__, indent=2, sort_keys=True, default=str) + "\n"

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> ModelConfig:
        """Config of the language model: the nested `text_config` if there is one, else this one."""
        nested = self.__dict__.get("text_config")
        if not isinstance(nested, dict):
            return self
        text = ModelConfig({})
        text.__dict__ = nested  # shared, so that changes are visible here
        return text

    def __repr__(self) -> str:
        return f"ModelConfig({self.__dict__!r})"


def export_config(
    raw: Mapping[str, Any], *, dtype: str, source: bool, rope_keys: tuple[str, str] = ROPE_KEYS
) -> dict[str, Any]:
    """The config.json for exported weights.

    A config read from a checkpoint (`source`) is written unchanged, except that a stated dtype follows the
    weights. A config created from scratch has both the old and the new spelling of dtype and rotary settings,
    since readers of one silently ignore the other.

    Args:
        dtype: name of the weights' dtype as in config.json, such as `"bfloat16"`.
        rope_keys: of the family, see `HFConfig`.
    """
    out = copy.deepcopy(dict(raw))
    for key in ("torch_dtype", "dtype"):
        if key in out or not source:
            out[key] = dtype
    return out if source else {**out, **both_rope_spellings(out, rope_keys)}
