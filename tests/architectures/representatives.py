"""Families that between them have every part: what layers do is tested with these, and how a config is read
with all families.

Tests marked `of_layers` run for them only. `pytest --all-families` runs them for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from mutations import spec_fields
from pairs import spec_of

from liger_models.architectures import list_architectures


@functools.cache
def representatives() -> tuple[str, ...]:
    """Families chosen one by one, each for the most parts that those before do not have."""
    parts = {family: frozenset(parts_of(family)) for family in list_architectures()}
    missing, chosen = set[Any]().union(*parts.values()), []
    while missing:
        chosen.append(max(parts, key=lambda family: len(parts[family] & missing)))
        missing -= parts[chosen[-1]]
    return tuple(chosen)


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
