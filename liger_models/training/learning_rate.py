"""The learning rate over a run: linear warmup to a peak, then one of four schedules.

    rate(step) = peak * (step + 1) / warmup                                  step < warmup
    rate(step) = minimum + (peak - minimum) * f((step - start) / length)     then

| schedule | f(x)                | falls                                                              |
|----------|---------------------|--------------------------------------------------------------------|
| cosine   | (1 + cos(pi x)) / 2 | from the end of warmup on (Loshchilov & Hutter, 2017)              |
| linear   | 1 - x               | from the end of warmup on                                          |
| wsd      | 1 - sqrt(x)         | in the last `decay` steps (Hu et al., 2024, arXiv:2404.06395;      |
|          |                     | Hägele et al., 2024, arXiv:2405.18392)                             |
| constant | 1                   | never                                                              |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from liger_models.convert.errors import ConfigError

SCHEDULES = ("cosine", "linear", "wsd", "constant")


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each step.

    Attributes:
        schedule: one of SCHEDULES.
        peak: the rate after warmup.
        total: steps of the run.
        warmup: steps of linear warmup; below 1: a fraction of `total`.
        decay: steps of the decay of "wsd"; below 1: a fraction of `total`.
        minimum: the final rate; unused by "constant".

    Raises:
        ConfigError: warmup, or warmup and decay together, are longer than the run.
    """

    schedule: str
    peak: float
    total: int
    warmup: float = 0
    decay: float = 0.2
    minimum: float = 0.0

    def __post_init__(self) -> None:
        warmup, decay = self._steps(self.warmup), self._falling
        if warmup + decay > self.total:
            and_decay = f" and {decay} of decay" if self.schedule == "wsd" else ""
            raise ConfigError(
                f"{warmup} steps of warmup{and_decay} in a run of {self.total} steps; shorten them, or train "
                "for longer"
            )

    def rate(self, step: int) -> float:
        """The rate of step number `step`, counted from 0."""
        warmup = self._steps(self.warmup)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        length = self._falling if self.schedule == "wsd" else self.total - warmup
        done = min(1.0, max(0.0, (step - (self.total - length)) / max(1, length)))
        left = {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 - done,
            "wsd": 1 - math.sqrt(done),
            "constant": 1.0,
        }[self.schedule]
        return self.minimum + (self.peak - self.minimum) * left if left < 1 else self.peak

    @property
    def _falling(self) -> int:
        return self._steps(self.decay) if self.schedule == "wsd" else 0

    def _steps(self, number: float) -> int:
        return round(number * self.total) if number < 1 else int(number)
