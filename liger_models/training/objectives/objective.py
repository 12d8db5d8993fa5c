"""What an objective is: which records it reads, the loss of a step, and what else it tells.

An objective is a dataclass, whose fields are its options. A run asks it for the share that a micro-batch has
in the loss of its step; the count that the loss is a mean over, of all micro-batches and ranks, is known
before.
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
    """What a micro-batch adds to a step.

    `loss` is a scalar with gradients; the sum over the step's micro-batches and ranks is its mean loss.
    `told` has, by the name of a metric, scalars without gradients, a sum and what it is divided by: both are
    summed.
    """

    loss: Tensor
    told: dict[str, tuple[Tensor, Tensor | float]]


@dataclass
class Objective:
    """What a run minimises. Subclasses are dataclasses of their options.

    Attributes:
        form: of the records that it reads, PAIRS or LABELLED, each of which makes a group (data/groups.py);
            None: documents.
        metrics: the names of what it tells beside the loss.
        unit: of the loss.
        needs_reference: whether groups need their log-probabilities under a reference model.
        shares_prompts: whether it asks for the scores of answers alone, so that their prompt may be computed
            once.
        rewards: whether the model has a head of rewards and not one of tokens.
        above_zero: options that must be, if it has them.
    """

    form: ClassVar[str | None] = None
    metrics: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str] = "nats per token"
    needs_reference: ClassVar[bool] = False
    shares_prompts: ClassVar[bool] = False
    rewards: ClassVar[bool] = False
    above_zero: ClassVar[tuple[str, ...]] = ("beta", "temperature", "top_k")

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: an option that must be above zero is not, or a weight is below.
        """
        for name in self.above_zero:
            value = getattr(self, name, 1)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; expected a number above 0")
        for name in ("hard_weight", "nll_weight", "desirable_weight", "undesirable_weight", "centering"):
            if not 0 <= getattr(self, name, 0) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0, or a number above it")
        if not math.isfinite(margin := getattr(self, "margin", 0)):
            raise ConfigError(f"margin is {margin}; expected a finite number")

    def prepare(self, load: Callable[[str], nn.Module]) -> None:
        """Before training; `load` gives a model by its name, without gradients, shared as the trained one."""

    def begin_step(self, model: Any, batches: Iterable[tuple[Any, bool]], device: torch.device) -> None:
        """Before the first micro-batch of a step, or an evaluation, with all of this process, and whether
        each counts.
        """

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        """The share of a micro-batch in a step, or an evaluation, that holds `counts`."""
        raise NotImplementedError

    def sums(self, batch: GroupBatch, log_probs: Tensor) -> Tensor:
        """What the reference's scores are kept as: log-probabilities of tokens [2 n, longest] -> of sequences
        [2 n].
        """
        return log_probs.sum(1)

    def about_sums(self) -> list[Any]:
        """The options that `sums` depends on."""
        return []

    def flops(self, model: StepFlops, counts: Counts) -> int:
        """What a step computes."""
        once = 0 if counts.shared is None else model.of(counts.shared, 0)
        return model.of(counts.lengths, counts.labels) - once


class Scored(NamedTuple):
    """Scores of 2 n sequences in rows: `log_probs` [2 n, longest], zero where there is no label, and
    `router_loss`, which MoE models add to theirs, or None.
    """

    log_probs: Tensor
    router_loss: Tensor | None

    def with_routers(self, loss: Tensor, share: float) -> Tensor:
        """A loss with the routers' for the share of a step that is here."""
        return loss if self.router_loss is None else loss + share * self.router_loss


def score_rows(model: nn.Module, batch: GroupBatch, shift_labels: Tensor | None = None) -> Scored:
    """The log-probabilities of a batch's labels, or of others in their place."""
    labels = batch.shift_labels if shift_labels is None else shift_labels
    scores = model(batch.input_ids, shift_labels=labels, score=ScoreOptions(), **batch.documents)
    rows = rows_of_documents(scores.log_probs, batch.cu_seqlens)[batch.sequences]
    return Scored(rows, scores.router_loss)


def labels_in_rows(batch: GroupBatch) -> Tensor:
    """Where there is a label, [sequences, longest] bool."""
    return rows_of_documents(batch.shift_labels != IGNORE, batch.cu_seqlens)[batch.sequences]


def checked(function: Callable[[], object], name: str) -> None:
    """Try a loss with its options.

    Raises:
        ConfigError: they are refused.
    """
    try:
        function()
    except ValueError as error:
        raise ConfigError(f"the objective {name}: {error}") from error
