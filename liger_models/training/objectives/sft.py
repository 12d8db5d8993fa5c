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

WEIGHTS = {"mtp": ("mtp_weight", "mtp_loss"), "indexer_loss": ("indexer_weight", "indexer_loss")}
"""Options that weigh further losses: the model's keyword, and the loss in its output."""


@dataclass
class SFT(Objective):
    """A mean over labels.

    loss_type: "nll", or "dft" (losses/sft_loss.py). mtp: weight of the loss of multi-token prediction
    (layers/model/mtp.py), which is added to the loss; 0: none, without the modules for it. indexer_loss:
    likewise of the loss of the indexers (layers/model/indexer_loss.py); 0: none, and they are frozen.
    """

    loss_type: str = "nll"
    mtp: float = 0.0
    indexer_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("nll", "dft"):
            raise ConfigError(f"loss_type is {self.loss_type!r}; expected nll or dft with objective sft")
        for name in WEIGHTS:
            if not 0 <= (weight := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {weight}; expected a finite weight of 0 or more")
            if weight and self.loss_type != "nll":
                raise ConfigError(f"{name} is {weight}, which adds to loss_type nll only; omit one of them")

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(found for name, (_, found) in WEIGHTS.items() if getattr(self, name))

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        documents = {"shift_labels": batch.shift_labels, **batch.documents}
        counted = batch.shift_labels != IGNORE
        if self.loss_type == "nll":
            given = {key: getattr(self, name) for name, (key, _) in WEIGHTS.items() if getattr(self, name)}
            found = model(batch.input_ids, num_items_in_batch=counts.labels, **documents, **given)
            share = counted.sum() / counts.labels
            return Share(found.loss, {name: (found[name], share) for name in self.metrics})
        scores = model(batch.input_ids, score=ScoreOptions(), **documents)
        loss = sft_loss(scores.log_probs, counted, dynamic=True, num_items=counts.labels)
        if scores.router_loss is not None:
            loss = loss + scores.router_loss * (counted.sum() / counts.labels)
        return Share(loss, {})
