"""What a training loop of ours does between steps, for transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from liger_models.layers.experts.load_balance import update_correction_bias
from liger_models.layers.experts.moe import Router


class CorrectionBiasCallback(TrainerCallback):
    """Balances the load of experts by the routers' correction bias (DeepSeek-V3 and its like), after each
    step of the optimizer: `liger_models.update_correction_bias`. Without it the bias stays as it was read.

        Trainer(model, arguments, train_dataset=rows, callbacks=[CorrectionBiasCallback(rate=0.001)])

    Args:
        rate: the bias's step; DeepSeek-V3 took 0.001, and 0 for the last of its training.

    Raises:
        ValueError: when training begins, a model in which no router has a correction bias.
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
