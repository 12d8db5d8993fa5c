"""KTO: answers labelled good or bad, against a reference (losses/kto_loss.py).

The divergence of policy and reference is estimated once per step, over all micro-batches and ranks, from
mismatched pairs of prompt and answer, one for each record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.losses import kto_kl, kto_loss
from liger_models.training.data import LABELLED, Counts, GroupBatch
from liger_models.training.objectives.objective import Objective, Share, score_rows
from liger_models.training.observing.flops import StepFlops


@dataclass
class KTO(Objective):
    """A mean over answers.

    loss_type: "kto", or "apo_zero_unpaired", without a divergence. The weights apply to good and to bad
    answers.
    """

    form: ClassVar[str | None] = LABELLED
    metrics: ClassVar[tuple[str, ...]] = ("kl", "good_reward", "bad_reward")
    unit: ClassVar[str] = "per answer"
    needs_reference: ClassVar[bool] = True

    beta: float = 0.1
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("kto", "apo_zero_unpaired"):
            raise ConfigError(f"loss_type is {self.loss_type!r}; expected kto or apo_zero_unpaired with kto")

    @torch.no_grad()
    def begin_step(
        self, model: Any, batches: Iterable[tuple[GroupBatch, bool]], device: torch.device
    ) -> None:
        if self.loss_type == "apo_zero_unpaired":
            return
        training = model.training
        model.eval()
        ratios = [torch.zeros(0, device=device)]
        for batch, counts in batches:
            strangers = batch.half(1).to(device)
            ratio = score_rows(model, strangers).log_probs.sum(1) - strangers.reference
            ratios += [ratio] if counts else []
        model.train(training)
        ratio = torch.cat(ratios)
        self.kl = kto_kl(ratio, torch.zeros_like(ratio))

    def share(self, model: nn.Module, batch: GroupBatch, counts: Counts) -> Share:
        answers = batch.half(0)
        scored = score_rows(model, answers)
        result = kto_loss(
            scored.log_probs.sum(1),
            answers.reference,
            answers.good,
            self.kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            num_items=counts.groups,
        )
        n, good = len(answers.good), answers.good
        metrics: dict[str, tuple[Tensor, Tensor | float]] = {
            "good_reward": ((result.rewards * good).sum(), good.sum()),
            "bad_reward": ((result.rewards * ~good).sum(), (~good).sum()),
        }
        if self.kl is not None:
            metrics["kl"] = (n * self.kl, float(n))
        return Share(scored.with_routers(result.loss, n / counts.groups), metrics)

    def flops(self, model: StepFlops, counts: Counts) -> int:
        """Mismatched answers have a forward pass only."""
        n, labels = counts.groups, counts.first_labels
        found = model.of(counts.lengths[:n], labels)
        if self.loss_type == "kto":
            found += model.forward(counts.lengths[n:], counts.labels - labels)
        return found
