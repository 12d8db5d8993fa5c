"""A result of `ops` for one provider, for the tables, the plot and the record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import Ceilings, Timing

ROWS = "ops.json"


@dataclass
class Row:
    """One provider of one operation at one shape."""

    operation: str
    group: str
    shape: str
    provider: str
    note: str = ""
    failed: bool = False
    error: float | None = None  # the largest relative error of an output or a gradient
    forward: Timing | None = None
    training: Timing | None = None
    forward_ceiling: float | None = None  # share of the ceiling, 0 to 1 and a little beyond
    training_ceiling: float | None = None
    forward_copy: float | None = None  # share of the ceiling that a copy of as many bytes reaches
    training_copy: float | None = None  # and two copies: of the forward and of the backward pass's bytes
    forward_tflops: float | None = None  # where the ceiling is that of matrix products
    tflops: float | None = None
    peak_bytes: int | None = None
    forward_launch_us: float | None = None
    training_launch_us: float | None = None

    def record(self) -> dict[str, object]:
        record: dict[str, object] = dict(vars(self))
        for name in ("forward", "training"):
            timing = record.pop(name)
            for part in ("median", "low", "high"):
                record[f"{name}_ms_{part}"] = getattr(timing, part, None)
        return record


def write_rows(path: Path, rows: Sequence[Row], ceilings: Ceilings) -> None:
    path.write_text(json.dumps({"ceilings": asdict(ceilings), "rows": [asdict(row) for row in rows]}) + "\n")


def read_rows(path: Path) -> tuple[list[Row], Ceilings]:
    found = json.loads(path.read_text())
    for row in found["rows"]:
        for name in ("forward", "training"):
            row[name] = Timing(**row[name]) if row[name] else None
    return [Row(**row) for row in found["rows"]], Ceilings(**found["ceilings"])
