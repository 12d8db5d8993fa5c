"""Table in docs/frameworks.md of supported tools, generated from test outcomes.

A marker names a tool and the cases that the test covers, as literal strings:

    @pytest.mark.supports("TRL", "DPO", "DPO with PEFT")

`pytest tests/hf tests/frameworks tests/vision --write-support-table` writes the cases of every tool, and adds
to the tools whose cases all passed in that run the versions of the environment and the date. A run with other
versions adds to what is there; a tool whose cases have changed starts anew. `tests/test_support_table.py`
fails where the table and the markers differ.
"""

from __future__ import annotations

import ast
import datetime
import importlib.metadata
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
HEADING = "| tool | cases | versions | on | last run |\n|---|---|---|---|---|\n"

# The tools in the order of the table, and the packages whose versions matter to each.
TOOLS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "Trainer": ("transformers",),
    "accelerate": ("accelerate", "transformers"),
    "PEFT": ("peft", "transformers"),
    "TRL": ("trl", "peft", "transformers"),
    "sentence-transformers": ("sentence-transformers", "transformers"),
    "Lightning": ("lightning", "transformers"),
    "FSDP2": ("torch", "accelerate", "transformers"),
    "DeepSpeed": ("deepspeed", "transformers"),
    "bitsandbytes": ("bitsandbytes", "peft", "transformers"),
    "torchao": ("torchao", "transformers"),
    "vLLM": ("transformers",),
    "vision-language models": ("transformers", "peft", "trl", "bitsandbytes"),
    "Axolotl, LLaMA-Factory, ms-swift, oumi": ("transformers",),
}


@dataclass(frozen=True)
class Row:
    """Row of one tool. `versions`: minor versions of each package."""

    cases: tuple[str, ...]
    versions: Mapping[str, tuple[str, ...]]
    devices: tuple[str, ...]
    date: str

    @classmethod
    def read(cls, cells: list[str]) -> Row:
        cases, versions, devices, date = cells
        packages = (package.split(" ", 1) for package in versions.split("; ") if package)
        return cls(
            tuple(cases.split("; ")),
            {name: tuple(numbers.split(", ")) for name, numbers in packages},
            tuple(devices.split(", ")) if devices else (),
            date,
        )

    def write(self, tool: str) -> str:
        versions = "; ".join(f"{name} {', '.join(numbers)}" for name, numbers in self.versions.items())
        cells = tool, "; ".join(self.cases), versions, ", ".join(self.devices), self.date
        return f"| {' | '.join(cells)} |\n"


def marked_cases() -> dict[str, tuple[str, ...]]:
    """Return each tool's cases in test order, read from source without importing the tests.

    Raises:
        ValueError: a marker names a tool missing in TOOLS, no case, or something other than literal strings.
    """
    found: dict[str, dict[str, None]] = {tool: {} for tool in TOOLS}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.supports" not in source:
            continue
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        marks = [call for call in calls if ast.unparse(call.func).endswith("mark.supports")]
        for mark in sorted(marks, key=lambda call: call.lineno):
            where = f"{path.relative_to(ROOT)}:{mark.lineno}"
            tool, *cases = [arg.value if isinstance(arg, ast.Constant) else None for arg in mark.args] or [
                None
            ]
            if tool not in TOOLS or not cases:
                raise ValueError(f"{where}: supports takes a tool, of {', '.join(TOOLS)}, and its cases")
            for case in cases:
                if not isinstance(case, str) or "|" in case or ";" in case:
                    raise ValueError(f"{where}: a case is a literal string without | and ;, found {case!r}")
                found[tool][case] = None
    return {tool: tuple(cases) for tool, cases in found.items() if cases}


def read_table() -> dict[str, Row]:
    """Return the rows of the committed table, by tool."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()[3:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tool: Row.read(rest) for tool, *rest in cells}


class TableWriter:
    """Pytest plugin that writes the table after a run."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, str, str]] = []
        self.complaints: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":  # or skipped or failed in setup
            for name, value in report.user_properties:
                if name == "supports":
                    tool, *cases = value
                    self.outcomes += [(tool, case, report.outcome) for case in cases]

    def pytest_sessionfinish(self) -> None:
        self.complaints = write_table(self.outcomes)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for complaint in self.complaints:
            terminalreporter.write_line(complaint)


def write_table(outcomes: Iterable[tuple[str, str, str]]) -> list[str]:
    """Write the table after a run, and return its problems.

    Args:
        outcomes: (tool, case, "passed", "failed" or "skipped") of the marked tests that ran.
    """
    ran: dict[tuple[str, str], set[str]] = {}
    for tool, case, outcome in outcomes:
        ran.setdefault((tool, case), set()).add(outcome)
    before, rows, complaints = read_table(), {}, []
    for tool, cases in marked_cases().items():
        row = before.get(tool)
        if row is None or set(row.cases) != set(cases):
            row = Row(cases, {}, (), "")
        lacking = [case for case in cases if ran.get((tool, case), set()) - {"skipped"} != {"passed"}]
        if not lacking:
            row = _after_a_run(tool, Row(cases, row.versions, row.devices, row.date))
        elif any(ran_tool == tool for ran_tool, _ in ran):
            complaints.append(f"{tool} is as before: not passed in this run: {'; '.join(lacking)}")
        rows[tool] = row
    text = PAGE.read_text(encoding="utf-8")
    table = HEADING + "".join(row.write(tool) for tool, row in rows.items())
    PAGE.write_text(
        text[: text.index(BEGIN)] + f"{BEGIN}\n{table}" + text[text.index(END) :], encoding="utf-8"
    )
    return complaints


def _after_a_run(tool: str, row: Row) -> Row:
    here = {name: _minor(importlib.metadata.version(name)) for name in TOOLS[tool]}
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ") if torch.cuda.is_available() else "CPU"
    versions = {name: _with(row.versions.get(name, ()), number) for name, number in here.items()}
    return Row(row.cases, versions, _with(row.devices, device), f"{datetime.date.today():%Y-%m-%d}")


def _minor(version: str) -> str:
    return ".".join(itertools.islice(version.split("+")[0].split("."), 2))


def _with(known: tuple[str, ...], new: str) -> tuple[str, ...]:
    return tuple(sorted({*known, new}, key=lambda name: [part.zfill(4) for part in name.split(".")]))
