"""Callbacks that run our between-step updates in transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from liger_models.layers.experts.load_balance import update_correction_bias
from liger_models.layers.experts.router import Router


class CorrectionBiasCallback(TrainerCallback):
    """Balances expert load through the routers' correction bias (DeepSeek-V3 and similar) after each
    optimizer step: `liger_models.update_correction_bias`. Without it the bias keeps its loaded value.

        Trainer(model, arguments, train_dataset=rows, callbacks=[CorrectionBiasCallback(rate=0.001)])

    Args:
        rate: step size of the bias; DeepSeek-V3 used 0.001, and 0 at the end of training.

    Raises:
        ValueError: when training begins, if no router of the model has a correction bias.
    """

    def __init__(self, rate: float = 0.001):
        self.rate = rate

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        routers = [module for module in others["model"].modules() if isinstance(module, Router)]
        if all(router.correction_bias is None for router in routers):
            raise ValueError(
                "CorrectionBiasCallback: no router of this model has a correction bias; leave it out"
            )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        update_correction_bias(others["model"], self.rate)
