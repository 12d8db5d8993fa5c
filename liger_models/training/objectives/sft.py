"""Negative log-likelihood of the trained tokens of documents: pretraining and supervised fine-tuning."""

from __future__ import annotations

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

    loss_type: "nll", or "dft" (losses/sft_loss.py).
    """

    loss_type: str = "nll"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("nll", "dft"):
            raise ConfigError(f"loss_type is {self.loss_type!r}; expected nll or dft with objective sft")

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        documents = {"shift_labels": batch.shift_labels, **batch.documents}
        if self.loss_type == "nll":
            return Share(model(batch.input_ids, num_items_in_batch=counts.labels, **documents).loss, {})
        scores = model(batch.input_ids, score=ScoreOptions(), **documents)
        counted = batch.shift_labels != IGNORE
        loss = sft_loss(scores.log_probs, counted, dynamic=True, num_items=counts.labels)
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (counted.sum() / counts.labels)
        return Share(loss, {})
