"""A family's card: what was checked of it, when and where, as data (docs/families/FAMILY.json).

card = make_card(find_architecture("llama"), earlier=Card.read(path), repository=Path())
card.write(path)
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import liger_models
from liger_models.architectures import Architecture
from liger_models.cards.checks import CHECKS
from liger_models.cards.workshop import NotRun, Workshop

PACKAGES = ("torch", "transformers", "liger-kernel")


@dataclass(frozen=True)
class Line:
    """What one check found.

    Attributes:
        check: its name in `CHECKS`.
        passed: None if it has not been run, here or anywhere.
        values: what it measured; `error` if it broke down, or `not_run`, what it needs.
        command: makes the line.
        date: ISO 8601, UTC.
        machine, versions: where, and with what.
    """

    check: str
    passed: bool | None
    values: Mapping[str, Any]
    command: str
    date: str
    machine: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Card:
    family: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that was run failed."""
        return all(line.passed is not False for line in self.lines)

    @staticmethod
    def read(path: Path) -> Card:
        raw = json.loads(path.read_text())
        return Card(raw["family"], tuple(Line(**line) for line in raw["lines"]))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join("    " + json.dumps(asdict(line)) for line in self.lines)
        path.write_text(f'{{\n  "family": {json.dumps(self.family)},\n  "lines": [\n{lines}\n  ]\n}}\n')


def make_card(
    architecture: Architecture,
    repository: Path,
    earlier: Card | None = None,
    on_line: Callable[[Line], None] = lambda line: None,
) -> Card:
    """Run every check of a family; what this machine cannot run stays as the earlier card has it.

    Args:
        architecture: the family.
        repository: a checkout, for published configs and the benchmarks.
        earlier: the card of another time or machine.
        on_line: called with each line when it is there.
    """
    before = {line.check: line for line in earlier.lines if line.passed is not None} if earlier else {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(architecture, Path(folder), repository)
        for check in CHECKS:
            line = _line(check, shop)
            line = before.get(check, line) if line.passed is None else line
            on_line(line)
            lines.append(line)
    return Card(architecture.model_type, tuple(lines))


def _line(check: str, shop: Workshop) -> Line:
    passed: bool | None
    values: Mapping[str, Any]
    try:
        if shop.reference_class is None:
            raise NotRun(f"needs a transformers that has {shop.architecture.reference}")
        passed, values = CHECKS[check].run(shop)
    except NotRun as reason:
        passed, values = None, {"not_run": str(reason)}
    except Exception as error:  # whatever breaks down is a line of the card, and the others go on
        first = (str(error).splitlines() or [""])[0]
        passed, values = False, {"error": f"{type(error).__name__}: {first}"}
    own_command = values.get("command")
    return Line(
        check,
        passed,
        {key: value for key, value in values.items() if key != "command"},
        own_command or f"liger-models card {shop.architecture.model_type}",
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        _machine(CHECKS[check].on_gpu),
        _versions(),
    )


def _machine(on_gpu: bool) -> str:
    if on_gpu and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"


def _versions() -> dict[str, str]:
    versions = {"liger_models": liger_models.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
