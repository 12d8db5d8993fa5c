"""A family's card: results of its checks, with date and machine, as data (docs/families/FAMILY.json).

card = make_card(find_architecture("llama"), earlier=Card.read(path), repository=Path())
card.write(path)
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import liger_models
from liger_models.architectures import Architecture
from liger_models.cards.checks import CHECKS, TRAINING_STEP
from liger_models.cards.results import Card, Line
from liger_models.cards.training_step import Outcome
from liger_models.cards.workshop import NotRun, Workshop
from liger_models.convert.host import cores

PACKAGES = ("torch", "transformers", "liger-kernel")


def make_card(
    architecture: Architecture,
    repository: Path,
    earlier: Card | None = None,
    checks: Sequence[str] = tuple(CHECKS),
    on_line: Callable[[Line], None] = lambda line: None,
) -> Card:
    """Run a family's checks; results of skipped checks are kept from the earlier card.

    Args:
        architecture: the family.
        repository: a checkout.
        earlier: a card from another time or machine.
        checks: the checks to run; the training step is left to `with_training_step`.
        on_line: called with each finished line.
    """
    before = {line.check: line for line in earlier.lines} if earlier else {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(architecture, Path(folder), repository)
        for check, runs in CHECKS.items():
            line = before.get(check) or _not_run(check, architecture, "not requested")
            if check in checks and runs.run is not None:
                line = _kept(line, _line(check, shop))
                on_line(line)
            lines.append(line)
    return Card(architecture.model_type, tuple(lines))


def with_training_step(card: Card, architecture: Architecture, found: Outcome | NotRun) -> Card:
    """Card updated with the result of `training_step.measure`; unchanged if that could not be run."""
    if isinstance(found, NotRun):
        line = _not_run(TRAINING_STEP, architecture, str(found))
    else:
        line = _new_line(TRAINING_STEP, architecture, *found, machine=torch.cuda.get_device_name())
        if any("compile" in provider.split("+") for provider in line.values["providers"]):
            line = replace(line, command=f"{line.command} --compiled")
    lines = [_kept(old, line) if old.check == TRAINING_STEP else old for old in card.lines]
    return Card(card.family, tuple(lines))


def _kept(old: Line, new: Line) -> Line:
    """Keep an earlier result if there is no new one."""
    return old if new.passed is None and old.passed is not None else new


def _line(check: str, shop: Workshop) -> Line:
    run = CHECKS[check].run
    assert run is not None
    try:
        if shop.reference_class is None:
            raise NotRun(f"needs a version of transformers with {shop.architecture.reference}")
        passed, values = run(shop)
    except NotRun as reason:
        return _not_run(check, shop.architecture, str(reason))
    except Exception as error:  # a crash becomes a line of the card, and the other checks go on
        first = (str(error).splitlines() or [""])[0]
        passed, values = False, {"error": f"{type(error).__name__}: {first}"}
    return _new_line(check, shop.architecture, passed, values)


def _not_run(check: str, architecture: Architecture, reason: str) -> Line:
    return _new_line(check, architecture, None, {"not_run": reason})


def _new_line(
    check: str, architecture: Architecture, passed: bool | None, values: Mapping[str, Any], machine: str = ""
) -> Line:
    only = f" --only {check}" if check == TRAINING_STEP else ""
    return Line(
        check,
        passed,
        values,
        f"liger-models card {architecture.model_type}{only}",
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine or f"{platform.machine()} CPU, {cores()} cores",
        _versions(),
    )


def _versions() -> dict[str, str]:
    versions = {"liger_models": liger_models.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
