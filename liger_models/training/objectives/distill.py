"""Distillation from a teacher on the documents' labels (layers/model/distilling.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from liger_models.convert.errors import ConfigError, DataError
from liger_models.layers.model.distilling import Distillation
from liger_models.training.data import IGNORE, Counts
from liger_models.training.objectives.objective import Objective, Share, checked


@dataclass
class Distill(Objective):
    """A mean over labels.

    loss_type: "jsd" or "cosine". beta: of the JSD, from 0, KL(teacher || student), to 1, KL(student ||
    teacher). hard_weight: weight of the cross entropy added to the divergence.
    """

    metrics: ClassVar[tuple[str, ...]] = ("divergence", "hard_loss")
    unit: ClassVar[str] = "per token"
    above_zero: ClassVar[tuple[str, ...]] = ("temperature", "top_k")  # beta may be zero

    teacher: str = ""
    loss_type: str = "jsd"
    beta: float = 0.0
    temperature: float = 1.0
    top_k: int | None = None
    hard_weight: float = 0.0
    lesson: Distillation | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ConfigError("distill needs a teacher; pass a model with the same vocabulary as --teacher")
        super().__post_init__()
        checked(lambda: self._lesson(nn.Identity()), "distill")

    def prepare(self, load: Callable[[str], nn.Module]) -> None:
        self.lesson = self._lesson(load(self.teacher))

    def share(self, model: nn.Module, batch: Any, counts: Counts) -> Share:
        if batch.images:
            raise DataError("a teacher reads only ids, but the data have images; remove them, or use sft")
        found = model(
            batch.input_ids,
            shift_labels=batch.shift_labels,
            num_items_in_batch=counts.labels,
            distill=self.lesson,
            **batch.documents,
        )
        here = (batch.shift_labels != IGNORE).sum() / counts.labels
        metrics: dict[str, tuple[Tensor, Tensor | float]] = {"divergence": (found.divergence, here)}
        if found.hard_loss is not None:
            metrics["hard_loss"] = (found.hard_loss, here)
        return Share(found.loss, metrics)

    def _lesson(self, teacher: nn.Module) -> Distillation:
        return Distillation(
            teacher,
            self.loss_type,
            self.beta,
            self.temperature,
            self.top_k,
            hard_weight=self.hard_weight,
        )
