"""Metrics of a run: a progress bar, one record per step in metrics.jsonl and metrics.csv, and a plot of the
losses.

A record has step, time (UTC), tokens (inputs so far), loss, lr, grad_norm, tokens_per_s and flops_per_s over
all processes, mfu (their fraction of the devices' peak: flops.py), memory (peak bytes of the GPU, or of the
process on a CPU), eval_loss on steps with an evaluation, and the objective's metrics, such as margin and
accuracy, with the prefix eval_ for evaluations. Step 0 is the untrained model. A non-finite loss or norm is
null; `skipped` is 1 if a step was skipped for it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from liger_models.convert.errors import TrainingError
from liger_models.training.observing.display import timestamp

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

METRICS = "metrics.jsonl"
COLUMNS = (
    *(
        "step",
        "time",
        "tokens",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "flops_per_s",
        "mfu",
        "filled",
        "memory",
    ),
    *("trainable_parameters", "skipped", "eval_loss"),
)


class Metrics:
    """The two files in `folder`, appended to a record at a time."""

    def __init__(self, folder: Path, *, resumed_step: int | None, extra: Sequence[str] = ()) -> None:
        """Start new files, or keep the records up to and including `resumed_step`, since later steps are
        repeated. `extra` are the objective's metrics."""
        self.columns = (*COLUMNS, *extra, *(f"eval_{name}" for name in extra))
        self.jsonl, self.csv = folder / METRICS, folder / "metrics.csv"
        kept = (
            [] if resumed_step is None else [r for r in read_metrics(self.jsonl) if r["step"] <= resumed_step]
        )
        _replace(self.jsonl, "".join(json.dumps(record) + "\n" for record in kept))
        _replace(self.csv, ",".join(self.columns) + "\n" + "".join(map(self._csv_line, kept)))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, with the time."""
        record = {"step": record["step"], "time": timestamp()} | record
        for path, line in ((self.jsonl, json.dumps(record) + "\n"), (self.csv, self._csv_line(record))):
            with _naming(path), path.open("a", encoding="utf-8") as file:
                file.write(line)

    def _csv_line(self, record: dict[str, Any]) -> str:
        line = io.StringIO()
        cells = [record.get(column, "") for column in self.columns]
        csv.writer(line, lineterminator="\n").writerow(cells)
        return line.getvalue()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a metrics.jsonl, without a last line truncated by a kill."""
    if path.is_file():
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                return
            yield record


class Speeds:
    """Throughput of steps.

    Args:
        peak: operations per second of all devices.
        extra: names of the objective's metrics.
    """

    def __init__(self, peak: float, extra: Sequence[str] = ()) -> None:
        self.peak, self.extra = peak, extra
        self.last: deque[tuple[int, int, float]] = deque(maxlen=20)

    def add(self, inputs: int, flops: int, seconds: float) -> dict[str, float | None]:
        """Metrics to record for a step."""
        self.last.append((inputs, flops, seconds))
        per_second = flops / seconds
        return {
            "tokens_per_s": inputs / seconds,
            "flops_per_s": per_second,
            "mfu": per_second / self.peak if per_second <= self.peak else None,
        }

    def line(self, record: dict[str, Any], evaluated: dict[str, Any]) -> str:
        """Text of the progress bar, with the average speed of the last steps and the loss on held-out data
        in `evaluated`, this record or an earlier one.
        """
        inputs, flops, seconds = (sum(column) for column in zip(*self.last, strict=True))
        loss = "-" if record["loss"] is None else f"{record['loss']:.3f}"
        extra = [f"{name} {record[name]:.3f}" for name in self.extra if record.get(name) is not None]
        parts = [f"loss {loss}", *extra, f"lr {record['lr']:.1e}", f"{inputs / seconds:,.0f} tok/s"]
        share = flops / seconds / self.peak
        shown = f" ({share:.0%})" if share <= 1 else ""  # the peak was measured while others used the machine
        parts.append(f"{flops / seconds / 1e12:,.3g} TFLOP/s{shown}")
        parts.append(f"{record['memory'] / 2**30:.2f} GiB")
        if (eval_loss := evaluated.get("eval_loss")) is not None:
            since = "" if evaluated["step"] == record["step"] else f" at step {evaluated['step']:,}"
            parts.append(f"held-out {eval_loss:.3f}{since}")
        return ", ".join(parts)


def finite_or_none(value: float) -> float | None:
    """Replace numbers that JSON does not have by None."""
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path}: cannot be written ({error.strerror or error}); free space and continue with --resume"
        ) from error


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with _naming(path):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a CUDA device, resident in this process otherwise; 0 if unknown (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
