"""The best evaluation of a run: when to write OUTPUT/best, and when to stop early."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from liger_models.training.checkpoints.run_folder import BEST, set_aside

BEST_FILE = "best.json"  # in OUTPUT/best: its metric, value and step
HIGHER_IS_BETTER = {"eval_loss": False, "eval_accuracy": True, "eval_margin": True}


class Best:
    """The best value of a metric so far.

    Args:
        metric: one of HIGHER_IS_BETTER.
        records: those of the run up to the checkpoint that it resumes from.

    Attributes:
        step: the step of the best value; None before the first evaluation of a trained model.
        value: the best value.
        since: evaluations since then.
    """

    def __init__(self, metric: str, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.metric, self.sign = metric, -1.0 if HIGHER_IS_BETTER[metric] else 1.0
        self.step: int | None = None
        self.value = 0.0
        self.since = 0
        for record in records:
            if record["step"]:  # not the untrained model
                self.improves(record["step"], record)

    def improves(self, step: int, record: Mapping[str, Any]) -> bool:
        """Whether this record's evaluation is the best; a record without one changes nothing."""
        if self.metric not in record:
            return False
        value = record[self.metric]
        if value is not None and (self.step is None or self.sign * value < self.sign * self.value):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    def text(self) -> str:
        """Contents of best.json."""
        return json.dumps({"metric": self.metric, "value": self.value, "step": self.step}) + "\n"

    def __str__(self) -> str:
        return f"{self.metric} was best at step {self.step}: {self.value:.4f}"


def check_best(output: Path, best: Best) -> Path | None:
    """Set OUTPUT/best aside unless it is the best of the records that a run resumes from: an abandoned
    part of the run wrote it. `best` then starts anew. Returns the folder's new place.
    """
    try:
        written = (output / BEST / BEST_FILE).read_text(encoding="utf-8")
    except OSError:
        written = ""
    if best.step is None or written != best.text():
        best.step, best.since = None, 0
        return set_aside(output / BEST)
    return None
