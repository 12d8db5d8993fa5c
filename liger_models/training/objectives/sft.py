"""Negative log-likelihood of the trained tokens of documents: pretraining and supervised fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_models.convert.errors import ConfigError
from liger_models.layers.model.scoring import ScoreOptions
from liger_models.losses import sft_loss
from liger_models.training.data import IGNORE, Counts
from liger_models.training.objectives.objective import Objective, Share


@dataclass
class SFT(Objective):
    """A mean over labels.

    loss_type: "nll", or "dft" (losses/sft_loss.py). mtp: weight of the loss of multi-token prediction
    (layers/model/mtp.py), which is added to the loss; 0: none, without the modules for it.
    """

    loss_type: str = "nll"
    mtp: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("nll", "dft"):
            raise ConfigError(f"loss_type is {self.loss_type!r}; expected nll or dft with objective sft")
        if not 0 <= self.mtp < math.inf:
            raise ConfigError(f"mtp is {self.mtp}; expected a finite weight of 0 or more")
        if self.mtp and self.loss_type != "nll":
            raise ConfigError(f"mtp is {self.mtp}, which adds to loss_type nll only; omit one of them")

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("mtp_loss",) if self.mtp else ()

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        documents = {"shift_labels": batch.shift_labels, **batch.documents}
        counted = batch.shift_labels != IGNORE
        if self.loss_type == "nll":
            documents |= {"mtp_weight": self.mtp} if self.mtp else {}
            found = model(batch.input_ids, num_items_in_batch=counts.labels, **documents)
            metrics = {"mtp_loss": (found.mtp_loss, counted.sum() / counts.labels)} if self.mtp else {}
            return Share(found.loss, metrics)
        scores = model(batch.input_ids, score=ScoreOptions(), **documents)
        loss = sft_loss(scores.log_probs, counted, dynamic=True, num_items=counts.labels)
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (counted.sum() / counts.labels)
        return Share(loss, {})
