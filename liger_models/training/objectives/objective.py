"""Interface of objectives: their records, the loss of a step, and further metrics.

An objective is a dataclass whose fields are its options. A run asks it for each micro-batch's share of the
step's loss. The divisor of the loss's mean, over all micro-batches and ranks, is known in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.layers.model.scoring import ScoreOptions
from liger_models.losses import rows_of_documents
from liger_models.training.data import IGNORE, Counts, GroupBatch
from liger_models.training.observing.flops import StepFlops


class Share(NamedTuple):
    """Contribution of a micro-batch to a step.

    `loss` is a scalar with gradients; its sum over the step's micro-batches and ranks is the step's mean
    loss. `metrics` maps names to (sum, divisor), scalars without gradients, which are both summed.
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor | float]]


@dataclass
class Objective:
    """A training objective. Subclasses are dataclasses of their options.

    Attributes:
        form: of its records, PAIRS or LABELLED, each of which becomes a group (data/groups.py); None:
            documents.
        metrics: names of metrics other than the loss.
        unit: of the loss.
        needs_reference: whether groups need log-probabilities under a reference model.
        shares_prompts: whether it scores only answers, so that their prompt can be computed once.
        samples: whether it learns from its own samples (training/sampling.py).
        rewards: whether the model has a reward head instead of a token head.
        above_zero: options that must be positive, if it has them.
    """

    form: ClassVar[str | None] = None
    metrics: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str] = "nats per token"
    needs_reference: ClassVar[bool] = False
    shares_prompts: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    rewards: ClassVar[bool] = False
    above_zero: ClassVar[tuple[str, ...]] = ("beta", "temperature", "top_k")

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: an option that must be positive is not, or a weight is negative.
        """
        for name in self.above_zero:
            value = getattr(self, name, 1)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; expected a number above 0")
        for name in ("hard_weight", "nll_weight", "desirable_weight", "undesirable_weight", "centering"):
            if not 0 <= getattr(self, name, 0) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not math.isfinite(margin := getattr(self, "margin", 0)):
            raise ConfigError(f"margin is {margin}; expected a finite number")

    def prepare(self, load: Callable[[str], nn.Module]) -> None:
        """Prepare for training; `load` returns a model by name, frozen and sharded like the trained one."""

    def begin_step(self, model: Any, batches: Iterable[tuple[Any, bool]], device: torch.device) -> None:
        """Prepare for a step or an evaluation, given this process's micro-batches, and whether each
        counts."""

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        """Compute a micro-batch's share of a step or evaluation with these `counts`."""
        raise NotImplementedError

    def sums(self, batch: GroupBatch, log_probs: Tensor) -> Tensor:
        """Reduce reference scores for storage: token log-probabilities [2 n, longest] -> sequences [2 n]."""
        return log_probs.sum(1)

    def about_sums(self) -> list[Any]:
        """Options that affect `sums`."""
        return []

    def flops(self, model: StepFlops, counts: Counts) -> int:
        """Operations of a step."""
        once = 0 if counts.shared is None else model.of(counts.shared, 0)
        return model.of(counts.lengths, counts.labels) - once


class Scored(NamedTuple):
    """Scores of 2 n sequences in rows: `log_probs` [2 n, longest], zero where there is no label, and
    `router_loss`, the auxiliary loss of MoE models, or None.
    """

    log_probs: Tensor
    router_loss: Tensor | None

    def with_routers(self, loss: Tensor, share: float) -> Tensor:
        """Add the router loss, weighted by this micro-batch's share of the step."""
        return loss if self.router_loss is None else loss + share * self.router_loss


def score_rows(model: nn.Module, batch: GroupBatch, shift_labels: Tensor | None = None) -> Scored:
    """Log-probabilities of a batch's labels, or of the given ones."""
    labels = batch.shift_labels if shift_labels is None else shift_labels
    scores = model(batch.input_ids, shift_labels=labels, score=ScoreOptions(), **batch.documents)
    rows = rows_of_documents(scores.log_probs, batch.cu_seqlens)[batch.sequences]
    return Scored(rows, scores.router_loss)


def labels_in_rows(batch: GroupBatch) -> Tensor:
    """Mask of positions with a label, [sequences, longest] bool."""
    return rows_of_documents(batch.shift_labels != IGNORE, batch.cu_seqlens)[batch.sequences]


def checked(function: Callable[[], object], name: str) -> None:
    """Check a loss function's options by calling it.

    Raises:
        ConfigError: the options are rejected.
    """
    try:
        function()
    except ValueError as error:
        raise ConfigError(f"the objective {name}: {error}") from error
