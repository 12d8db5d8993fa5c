"""Sums of a step over micro-batches and processes: the loss and the objective's metrics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

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
