"""The base of the parts of a batch: frozen, and moved to another device field by field."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

SHARED = {"shared": True}
"""Metadata of a field that copies on other devices share: `field(metadata=SHARED)`."""

PartT = TypeVar("PartT", bound="Part")
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Part:
    """A frozen part of a batch.

    `to` copies every field that holds tensors, a device or other parts, and shares numbers and strings. A
    field of any other type must be declared as shared, so that no field is forgotten.

    Parts travel inside `Sequences`, never as an argument of a module: sharding frameworks search the
    arguments of a module for dataclasses, and round the tensors in them.
    """

    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, metadata=SHARED)

    def to(self: PartT, device: torch.device) -> PartT:
        """The same part on another device, copied once. Each copy makes its own cached values."""
        if device == _device_of(self):
            return self
        return self._once(("copy", device), lambda: self._copied_to(device))

    def _copied_to(self: PartT, device: torch.device) -> PartT:
        copied = {
            f.name: _moved(getattr(self, f.name), device, f"{type(self).__name__}.{f.name}")
            for f in fields(self)
            if not f.metadata.get("shared")
        }
        return replace(self, **copied)

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, cached under `key` for all layers. Parts that are made while torch.compile traces are not
        cached, since they belong to the traced graph.
        """
        if key not in self._made:
            made = make()
            if isinstance(made, Part) and torch.compiler.is_compiling():
                return made
            self._made[key] = made
        return self._made[key]


def _device_of(part: Part) -> torch.device | None:
    for f in fields(part):
        value = getattr(part, f.name)
        if isinstance(value, torch.device):
            return value
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, Part):
            return _device_of(value)
    return None


def _moved(value: Any, device: torch.device, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        return device
    if isinstance(value, Tensor | Part):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device, name) for item in value)
    if isinstance(value, Mapping):
        return {key: _moved(item, device, name) for key, item in value.items()}
    raise TypeError(
        f"{name} holds a {type(value).__name__}, which cannot be moved to {device}: declare the field as "
        "shared, by field(metadata=SHARED), or make the value a Part"
    )
