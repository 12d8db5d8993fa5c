"""Reward modelling from pairs of answers, with a single-output head (losses/reward_loss.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from liger_models.losses import reward_loss
from liger_models.training.data import PAIRS, Counts, GroupBatch
from liger_models.training.objectives.objective import Objective, Share
from liger_models.training.objectives.preferences import preference_metrics
from liger_models.training.observing.flops import StepFlops


@dataclass
class Reward(Objective):
    """A mean over pairs.

    margin: minimum difference of the rewards. centering: weight of the term that centres rewards around zero.
    """

    form: ClassVar[str | None] = PAIRS
    metrics: ClassVar[tuple[str, ...]] = ("margin", "accuracy", "chosen_reward", "rejected_reward")
    unit: ClassVar[str] = "nats per pair"
    rewards: ClassVar[bool] = True

    margin: float = 0.0
    centering: float = 0.0

    def share(self, model: nn.Module, batch: GroupBatch, counts: Counts) -> Share:
        rewards = model(batch.input_ids, cu_seqlens=batch.cu_seqlens).logits[:, 0]
        chosen, rejected = rewards.chunk(2)
        options = {"centering": self.centering, "num_items": counts.groups}
        result = reward_loss(chosen, rejected, self.margin, **options)
        return Share(result.loss, preference_metrics(result))

    def flops(self, model: StepFlops, counts: Counts) -> int:
        """Operations with one reward per sequence."""
        return model.of(counts.lengths, len(counts.lengths))
