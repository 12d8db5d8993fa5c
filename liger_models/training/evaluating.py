"""Evaluations of a run: the objective on held-out data, and samples of what the model writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from liger_models.kernels._dispatch import float64_device
from liger_models.training.config import TrainConfig
from liger_models.training.data import Documents, Stream
from liger_models.training.objectives import Objective
from liger_models.training.observing.display import Display
from liger_models.training.observing.samples import Samples
from liger_models.training.processes.watch import Watch
from liger_models.training.processes.world import World
from liger_models.training.results import Tally


class Evaluation:
    """The held-out data and the sample prompts of a run; false if it has neither.

    Args:
        documents: held-out data.
        samples: prompts that the first process answers.
    """

    def __init__(
        self,
        documents: Documents | None,
        samples: Samples | None,
        objective: Objective,
        config: TrainConfig,
        world: World,
        watch: Watch,
    ) -> None:
        self.documents, self.samples, self.objective = documents, samples, objective
        self.config, self.world, self.watch = config, world, watch
        self.tally = Tally(objective.metrics, world)

    def __bool__(self) -> bool:
        return self.documents is not None or self.samples is not None

    @torch.no_grad()
    def __call__(self, model: Any, step: int, display: Display | None = None) -> dict[str, float | None]:
        """Mean loss over the held-out data, `eval_loss`, and the objective's other metrics. The model is in
        training mode before and afterwards.

        Args:
            step: the number of steps that the model has taken.
            display: shows the progress.
        """
        found: dict[str, float | None] = {}
        if self.documents is not None:
            model.eval()
            found = self._of_documents(model, self.documents, display or Display(False, 0))
            model.train()
        if self.samples is not None:
            self.watch.suspend_deadline("generating samples")  # the others wait for the first process
            if self.world.main:
                self.samples.generate(model, step, self.world.device, self.world.say)
        return found

    def rows(self) -> Iterator[Any]:
        """The rows of an evaluation, the same for all processes."""
        assert self.documents is not None
        config, most = self.config, []
        if config.eval_tokens:
            most.append(max(1, config.eval_tokens // config.seq_len))
        if config.eval_steps:
            most.append(config.eval_steps * self._rows_of_batches)
        epoch = Stream(self.documents, config.seq_len, config.seed).epoch(0)
        return itertools.islice(epoch, min(most, default=None))

    @property
    def _rows_of_batches(self) -> int:
        """Rows of one batch of each process."""
        return self.world.data_size * self.config.batch_size

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """This process's batches, and whether they count. Sharded models run on all processes: those without
        remaining rows repeat others' batches.
        """
        assert self.documents is not None
        size, world = self.config.batch_size, self.world
        epoch = self.rows()
        while rows := list(itertools.islice(epoch, self._rows_of_batches)):
            self.watch.mark("a held-out batch")
            own = rows[world.data_rank * size :][:size]
            yield self.documents.batch(own or rows[:size]), bool(own)

    def _of_documents(self, model: Any, documents: Documents, display: Display) -> dict[str, float | None]:
        world, rows = self.world, 0

        def counted() -> Iterator[Any]:
            nonlocal rows
            for row in self.rows():
                rows += 1
                yield row

        counts = documents.count(counted())
        device = float64_device(world.device)
        total = self.tally.zeros().to(device, torch.float64)
        self.objective.begin_step(model, self._batches(), world.device)
        with display.evaluation(math.ceil(rows / self._rows_of_batches)) as advance:
            for batch, own in self._batches():
                share = self.tally.of(self.objective.share(model, batch.to(world.device), counts))
                total += share.to(device) if own else 0
                advance()
        loss, metrics = self.tally.means(world.sum(total).tolist())
        return {"eval_loss": loss, **{f"eval_{name}": value for name, value in metrics.items()}}
