"""Families that together have every kind of part: layers are tested with these, the reading of configs with
all.

Tests marked `of_layers` run for them only. `pytest --all-families` runs them for all. A test of a mechanism
to which other parts matter names them: `of_layers("tokens")` for how tokens see each other,
`of_layers("head")` for embeddings, logits and losses, `of_layers("names")` for the names of checkpoints,
`of_layers("rotations")`, and `of_layers("settings")` for every setting of every part, which takes the most
families.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mutations import form_at, spec_fields
from older import FOLLOWED, SINCE_5_24, installed_release
from pairs import spec_of
from variants import rotation

from liger_models.architectures import find_architecture, list_architectures


@functools.cache
def representatives(parts: str = "layers") -> tuple[str, ...]:
    """Families chosen one by one, each for having the most parts that the earlier ones lack: kinds of parts
    of "layers", of "tokens" what their mixers show a token, of the "head" the model's own settings, of
    "names" what layouts do, of "rotations" rotary settings, or all "settings". None of what is tested "alone"
    at night, and by day together with others.
    """
    of = {
        "layers": parts_of,
        "settings": settings_of,
        "tokens": views_of,
        "head": settings_of_head,
        "names": names_of,
        "rotations": lambda family: [rotation(family)],
        "alone": lambda family: (),
    }
    absent = SINCE_5_24 if (installed_release() or FOLLOWED) < (5, 24) else frozenset()
    tried = [family for family in list_architectures() if family not in absent]
    return _with_all({family: frozenset(of[parts](family)) for family in tried})


@functools.cache
def vision_representatives(parts: str = "encoder") -> tuple[str, ...]:
    """The same for vision-language families, by the kinds of their blocks and of the parts of the "encoder",
    or by what matters to "tokens": how pictures become tokens, and which positions these have.
    """
    of = {"encoder": kinds_of, "tokens": places_of}[parts]
    return _with_all({family: frozenset(of(family)) for family in list_architectures(vision=True)})


def _with_all(parts: dict[str, frozenset[Any]]) -> tuple[str, ...]:
    missing, chosen = set[Any]().union(*parts.values()), []
    while missing:
        chosen.append(max(parts, key=lambda family: len(parts[family] & missing)))
        missing -= parts[chosen[-1]]
    return tuple(chosen)


def leave_layers_to(
    families: Callable[..., tuple[str, ...]], config: Any, items: list[Any], folder: Path
) -> None:
    """Deselect tests of a folder marked `of_layers`, except for the families that a function gives for the
    marker's arguments, unless `--all-families`.
    """
    if config.getoption("--all-families"):
        return
    inside = {path for path in {item.path for item in items} if folder in path.parents}
    left_out = [
        item
        for item in items
        if item.path in inside
        and (mark := item.get_closest_marker("of_layers"))
        and item.callspec.params["family"] not in families(*mark.args)
    ]
    config.hook.pytest_deselected(items=left_out)
    ids = {id(item) for item in left_out}
    items[:] = [item for item in items if id(item) not in ids]


def parts_of(family: str) -> Iterator[Any]:
    """The kinds of a family's blocks and of their parts, by where these stand."""
    for block in spec_of(family).blocks:
        yield block.topology, len(block.mixers)
        yield from _types(block, "block")


def settings_of(family: str) -> Iterator[Any]:
    """The kinds of a family's blocks, and each setting of its parts: present or not, or the choice made."""
    spec = spec_of(family)
    for block in spec.blocks:
        yield type(block), tuple(map(type, block.mixers)), type(block.mlp)
    for _, field, value, _ in spec_fields(spec):
        if value is None or isinstance(value, bool | str):
            yield field, value
        else:
            yield field, type(value) if is_dataclass(value) else bool(value)


OF_TOKENS = "window", "chunk", "indexer", "sinks", "slopes", "query_scale", "ropes"
"""Settings of token mixers that depend on positions or limit the tokens that a token attends to."""


def views_of(family: str) -> Iterator[Any]:
    """The kinds of a family's mixers, what they show a token of others, and how positions count."""
    spec = spec_of(family)
    for block in spec.blocks:
        yield len(block.mixers)
        for mixer in block.mixers:
            yield type(mixer)
            yield from ((name, bool(getattr(mixer, name, None))) for name in OF_TOKENS)
    yield "added", spec.learned_positions is not None, spec.sinusoidal_positions
    yield "padded", spec.padding_has_positions


def settings_of_head(family: str) -> Iterator[Any]:
    """The settings of a family's model outside of its layers."""
    spec = spec_of(family)
    for path, *_ in spec_fields(spec):
        if not any(isinstance(step, int) for step in path):
            yield form_at(spec, path)


def names_of(family: str) -> Iterator[Any]:
    """The kinds of a family's mixers and of its feed-forward parts, and what its layouts change."""
    for block in spec_of(family).blocks:
        yield from (type(block.mlp), *map(type, block.mixers))
    for layout in find_architecture(family).layouts:
        yield from (field.name for field in fields(layout) if getattr(layout, field.name))
        yield "in_one", layout.in_one


def kinds_of(family: str) -> Iterator[Any]:
    """The kinds of a family's blocks, and of the parts of its encoder by their place."""
    spec = spec_of(family)
    for block in spec.blocks:
        yield type(block), tuple(map(type, block.mixers)), type(block.mlp)
    yield from _types(spec.vision, "vision")


def places_of(family: str) -> Iterator[Any]:
    """How a family's pictures become tokens, and how these are placed and seen."""
    vision = spec_of(family).vision
    yield type(vision)
    yield from ((name, type(getattr(vision, name, None))) for name in ("pictures", "positions"))
    yield "spans", getattr(vision, "spans", None)
    yield "videos", getattr(vision, "video_id", None) is not None


def _types(part: Any, place: str) -> Iterator[tuple[str, type]]:
    yield place, type(part)
    for field in fields(part):
        value = getattr(part, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                yield from _types(each, f"{place}.{field.name}")
