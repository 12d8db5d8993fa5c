"""Families that together have every part: layers are tested with these, the reading of configs with all.

Tests marked `of_layers` run for them only. `pytest --all-families` runs them for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mutations import spec_fields
from pairs import spec_of

from liger_models.architectures import list_architectures


@functools.cache
def representatives() -> tuple[str, ...]:
    """Families chosen one by one, each for having the most parts that the earlier ones lack."""
    return _with_all({family: frozenset(parts_of(family)) for family in list_architectures()})


@functools.cache
def vision_representatives() -> tuple[str, ...]:
    """The same for vision-language families, by the kinds of their blocks and of the parts of encoders."""
    return _with_all({family: frozenset(kinds_of(family)) for family in list_architectures(vision=True)})


def _with_all(parts: dict[str, frozenset[Any]]) -> tuple[str, ...]:
    missing, chosen = set[Any]().union(*parts.values()), []
    while missing:
        chosen.append(max(parts, key=lambda family: len(parts[family] & missing)))
        missing -= parts[chosen[-1]]
    return tuple(chosen)


def leave_layers_to(families: Iterable[str], config: Any, items: list[Any], folder: Path) -> None:
    """Deselect tests of a folder marked `of_layers`, except for some families, unless `--all-families`."""
    if config.getoption("--all-families"):
        return
    left_out = [
        item
        for item in items
        if folder in item.path.parents
        and item.get_closest_marker("of_layers")
        and item.callspec.params["family"] not in families
    ]
    config.hook.pytest_deselected(items=left_out)
    ids = {id(item) for item in left_out}
    items[:] = [item for item in items if id(item) not in ids]


def parts_of(family: str) -> Iterator[Any]:
    """The kinds of a family's blocks, and each setting of its parts: present or not, or the choice made."""
    spec = spec_of(family)
    for block in spec.blocks:
        yield type(block), tuple(map(type, block.mixers)), type(block.mlp)
    for _, field, value, _ in spec_fields(spec):
        if value is None or isinstance(value, bool | str):
            yield field, value
        else:
            yield field, type(value) if is_dataclass(value) else bool(value)


def kinds_of(family: str) -> Iterator[Any]:
    """The kinds of a family's blocks, and of the parts of its encoder by their place."""
    spec = spec_of(family)
    for block in spec.blocks:
        yield type(block), tuple(map(type, block.mixers)), type(block.mlp)
    yield from _types(spec.vision, "vision")


def _types(part: Any, place: str) -> Iterator[tuple[str, type]]:
    yield place, type(part)
    for field in fields(part):
        value = getattr(part, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                yield from _types(each, f"{place}.{field.name}")
