"""Preferences between two answers: DPO with a reference, ORPO and SimPO without one.

Each loss is a mean over all pairs of a step, regardless of micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.losses import PreferenceLoss, dpo_loss, orpo_loss, sequence_log_probs, simpo_loss
from liger_models.training.data import PAIRS, Counts, GroupBatch
from liger_models.training.objectives.objective import (
    Objective,
    Share,
    checked,
    labels_in_rows,
    score_rows,
)

_NOTHING = torch.zeros(1)


@dataclass
class Preference(Objective):
    """A loss on pairs."""

    form: ClassVar[str | None] = PAIRS
    metrics: ClassVar[tuple[str, ...]] = ("margin", "accuracy", "chosen_reward", "rejected_reward")
    unit: ClassVar[str] = "nats per pair"

    def share(self, model: nn.Module, batch: GroupBatch, counts: Counts) -> Share:
        scored = score_rows(model, batch, self.labels(batch))
        result = self.loss(batch, scored.log_probs, counts)
        loss = scored.with_routers(result.loss, len(batch.good) / counts.groups)
        return Share(loss, preference_metrics(result))

    def labels(self, batch: GroupBatch) -> Tensor | None:
        """Labels to score, [1, T]; None: the answers."""
        return None

    def loss(self, batch: GroupBatch, log_probs: Tensor, counts: Counts) -> PreferenceLoss:
        """Loss from token log-probabilities [2 n, longest]."""
        raise NotImplementedError


def preference_metrics(result: PreferenceLoss) -> dict[str, tuple[Tensor, Tensor | float]]:
    chosen, rejected = result.chosen_rewards, result.rejected_rewards
    sums = {
        "margin": (chosen - rejected).sum(),
        "accuracy": (chosen > rejected).float().sum(),
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
    }
    return {name: (value, float(len(chosen))) for name, value in sums.items()}


@dataclass
class DPO(Preference):
    """DPO and its variants; losses/dpo_loss.py documents types and options.

    loss_type: a type, or a sum such as "sigmoid=0.8+bco_pair=0.2+sft=1". desensitize: LD-DPO's alpha.
    """

    needs_reference: ClassVar[bool] = True
    shares_prompts: ClassVar[bool] = True

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    desensitize: float | None = None
    types: Mapping[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()

        def parse() -> None:
            pieces = [piece.partition("=") for piece in self.loss_type.split("+")]
            self.types = {name: float(weight) if equals else 1.0 for name, equals, weight in pieces}
            if len(self.types) < len(pieces):
                raise ValueError(f"loss_type {self.loss_type!r} has a type twice; add up its weights")
            sequence_log_probs(torch.zeros(2, 1), torch.ones(2, 1), self.desensitize)
            self._dpo_loss(*[_NOTHING] * 4, torch.ones(2), _NOTHING[0])

        checked(parse, "dpo")

    def sums(self, batch: GroupBatch, log_probs: Tensor) -> Tensor:
        counted = labels_in_rows(batch).to(log_probs.device)
        return sequence_log_probs(log_probs, counted, self.desensitize)

    def about_sums(self) -> list[Any]:
        return [self.desensitize]

    def loss(self, batch: GroupBatch, log_probs: Tensor, counts: Counts) -> PreferenceLoss:
        lengths = labels_in_rows(batch).to(log_probs.device).sum(1)
        both = *self.sums(batch, log_probs).chunk(2), *batch.reference.chunk(2)
        nll = -log_probs.chunk(2)[0].sum() / counts.first_labels
        return self._dpo_loss(*both, lengths, nll, num_items=counts.groups)

    def _dpo_loss(self, *scores: Tensor, num_items: int | None = None) -> PreferenceLoss:
        *both, lengths, nll = scores
        chosen_lengths, rejected_lengths = lengths.chunk(2)
        return dpo_loss(
            *both,
            loss_type=self.types,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            f_divergence=self.f_divergence,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
            nll=nll if "sft" in self.types else None,
            num_items=num_items,
        )


@dataclass
class ORPO(Preference):
    """losses/orpo_loss.py: odds ratio of both answers, plus likelihood of prompt and chosen answer."""

    beta: float = 0.1

    def labels(self, batch: GroupBatch) -> Tensor:
        cut = int(batch.cu_seqlens[len(batch.good)])
        return torch.cat([batch.following[:, :cut], batch.shift_labels[:, cut:]], 1)

    def loss(self, batch: GroupBatch, log_probs: Tensor, counts: Counts) -> PreferenceLoss:
        counted = labels_in_rows(batch).to(log_probs.device)
        chosen, rejected = ((log_probs * counted).sum(1) / counted.sum(1)).chunk(2)
        nll = -log_probs.chunk(2)[0].sum() / counts.first_said
        return orpo_loss(chosen, rejected, nll, beta=self.beta, num_items=counts.groups)


@dataclass
class SimPO(Preference):
    """losses/simpo_loss.py, where `margin` is gamma; nll_weight, its alpha, adds the chosen answers' negative
    log-likelihood.
    """

    shares_prompts: ClassVar[bool] = True

    beta: float = 2.0
    margin: float = 1.0
    nll_weight: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked(lambda: simpo_loss(_NOTHING, _NOTHING, label_smoothing=self.label_smoothing), "simpo")

    def loss(self, batch: GroupBatch, log_probs: Tensor, counts: Counts) -> PreferenceLoss:
        lengths = labels_in_rows(batch).to(log_probs.device).sum(1)
        chosen, rejected = (log_probs.sum(1) / lengths).chunk(2)
        nll: Any = None
        if self.nll_weight:
            nll = -log_probs.chunk(2)[0].sum() / counts.first_labels
        return simpo_loss(
            chosen,
            rejected,
            nll,
            beta=self.beta,
            gamma=self.margin,
            alpha=self.nll_weight,
            label_smoothing=self.label_smoothing,
            num_items=counts.groups,
        )
