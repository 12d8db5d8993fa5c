"""Results: of a step over micro-batches and processes, as sums, and of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.training.data import StepData
from liger_models.training.objectives import Share
from liger_models.training.observing.metrics import finite_or_none
from liger_models.training.processes.world import World


class Tally:
    """Sums as one tensor [1 + 2 * metrics], reduced over processes in one exchange: the loss, and each
    metric's sum and divisor.
    """

    def __init__(self, metrics: Sequence[str], world: World) -> None:
        self.metrics, self.world = metrics, world

    def zeros(self) -> Tensor:
        return torch.zeros(1 + 2 * len(self.metrics), device=self.world.device)

    def of(self, share: Share) -> Tensor:
        """Sums of a micro-batch."""
        pairs = [share.metrics.get(name, (0.0, 0.0)) for name in self.metrics]
        loss = share.loss.detach() / self.world.sequence
        numbers = (x if isinstance(x, Tensor) else loss.new_tensor(x) for x in itertools.chain(*pairs))
        return torch.stack([loss, *(x.to(loss) for x in numbers)])

    def means(self, sums: Sequence[float]) -> tuple[float, dict[str, float | None]]:
        """The loss and the metrics; None for metrics without values."""
        loss, *rest = sums
        found = zip(self.metrics, rest[::2], rest[1::2], strict=True)
        return loss, {name: finite_or_none(total / count) if count else None for name, total, count in found}


class TrainingInterrupted(KeyboardInterrupt):
    """A signal stopped the run; a checkpoint was saved first. `exit_code` is the shell's 128 + signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class Outcome(NamedTuple):
    """Outcome of a step: the mean loss, the gradient's norm before clipping, whether a rank was asked to
    stop, and the objective's metrics by name.
    """

    loss: float
    norm: float
    stop: bool
    data: StepData
    metrics: dict[str, float | None]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass
class TrainResult:
    """Result of a finished run.

    Attributes:
        final: folder of the trained model, or of its adapter.
        steps: number of steps taken, those before a resumed checkpoint included.
        records: of metrics.jsonl, one per step; in the first process only.
        output: folder of the run.
        checkpoints: its checkpoint-N folders, the oldest first.
        best: folder of the best model, with keep_best.
    """

    final: Path
    steps: int
    records: list[dict[str, Any]] = field(repr=False)
    output: Path = Path()
    checkpoints: list[Path] = field(default_factory=list)
    best: Path | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of each metric."""
        return {name: value for record in self.records for name, value in record.items()}
