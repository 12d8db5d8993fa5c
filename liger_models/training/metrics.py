"""What a run tells: a progress bar, one record a step in metrics.jsonl and metrics.csv, and the loss curve
as a picture.

A record holds step, tokens (inputs so far), loss, lr, grad_norm, of all processes tokens_per_s and
flops_per_s, mfu (the share of the latter in what all devices could do: flops.py), memory (peak bytes: of the
GPU, or of the process on a CPU) and, on steps that evaluated, eval_loss. Step 0 is the untrained model. A
loss or a norm that is not finite is null; `skipped` is 1 where a step was passed over for it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import resource
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from liger_models.convert.errors import TrainingError
from liger_models.training.data import StepData
from liger_models.training.flops import StepFlops

METRICS = "metrics.jsonl"
COLUMNS = (
    *("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "flops_per_s", "mfu", "memory"),
    *("skipped", "eval_loss"),
)


class Metrics:
    """The two files in `folder`, appended to a record at a time."""

    def __init__(self, folder: Path, *, resumed_step: int | None) -> None:
        """Begin anew, or keep the records up to and including `resumed_step`: later ones will be made
        again."""
        self.jsonl, self.csv = folder / METRICS, folder / "metrics.csv"
        kept = (
            [] if resumed_step is None else [r for r in read_metrics(self.jsonl) if r["step"] <= resumed_step]
        )
        _replace(self.jsonl, "".join(json.dumps(record) + "\n" for record in kept))
        _replace(self.csv, ",".join(COLUMNS) + "\n" + "".join(map(_csv_line, kept)))

    def write(self, record: dict[str, Any]) -> None:
        for path, line in ((self.jsonl, json.dumps(record) + "\n"), (self.csv, _csv_line(record))):
            with _naming(path), path.open("a", encoding="utf-8") as file:
                file.write(line)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a kill cut short is not one."""
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
    """What steps do in their time.

    Args:
        flops: counts the operations of a step.
        peak: those that all devices could do in a second.
    """

    def __init__(self, flops: StepFlops, peak: float) -> None:
        self.flops, self.peak = flops, peak
        self.last: deque[tuple[int, int, float]] = deque(maxlen=20)

    def add(self, data: StepData, seconds: float) -> dict[str, float]:
        """What is recorded of a step."""
        flops = self.flops.of(data.lengths, data.labels)
        self.last.append((data.inputs, flops, seconds))
        per_second = flops / seconds
        return {
            "tokens_per_s": data.inputs / seconds,
            "flops_per_s": per_second,
            "mfu": per_second / self.peak,
        }

    def line(self, record: dict[str, Any], eval_loss: float | None) -> str:
        """A record for the progress bar, with the speed of the last steps together."""
        inputs, flops, seconds = (sum(column) for column in zip(*self.last, strict=True))
        loss = "-" if record["loss"] is None else f"{record['loss']:.3f}"
        parts = [f"loss {loss}", f"lr {record['lr']:.1e}", f"{inputs / seconds:,.0f} tok/s"]
        parts.append(f"{flops / seconds / 1e12:,.3g} TFLOP/s ({flops / seconds / self.peak:.0%})")
        parts.append(f"{record['memory'] / 2**30:.2f} GiB")
        if eval_loss is not None:
            parts.append(f"held-out {eval_loss:.3f}")
        return ", ".join(parts)


def finite_or_none(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path}: cannot be written ({error.strerror or error}); make room and go on with --resume"
        ) from error


def _csv_line(record: dict[str, Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([record.get(column, "") for column in COLUMNS])
    return line.getvalue()


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    with _naming(path):
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a CUDA device, resident in this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def plot_losses(records: list[dict[str, Any]], path: Path) -> bool:
    """Draw training and held-out loss over steps into a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state of pyplot
    axes = figure.add_subplot()
    train = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    held = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1, label="training")
    if held:
        axes.plot(*zip(*held, strict=True), color="tab:orange", marker="o", markersize=4, label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True
