"""The start of a run: which kind it is."""

from __future__ import annotations

from collections.abc import Iterable

from liger_models.training.callbacks import Callback
from liger_models.training.config import TrainConfig
from liger_models.training.loop import Run, TrainResult, train_as
from liger_models.training.objectives import OBJECTIVES
from liger_models.training.sampling import SamplingRun


def train(config: TrainConfig, callbacks: Iterable[Callback] = ()) -> TrainResult:
    """Run `config` to its end, alone or as one of torchrun's ranks. `callbacks` are called during the run.

    Raises ConfigError, DataError, CheckpointError and UnsupportedModelError before training; TrainingError if
    the loss or the gradient becomes non-finite, with the last good state saved; TrainingInterrupted after
    SIGINT or SIGTERM, with the state saved; and errors of callbacks.
    """
    return train_as(SamplingRun if OBJECTIVES[config.objective].samples else Run, config, callbacks)
