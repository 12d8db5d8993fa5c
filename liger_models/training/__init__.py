"""Training: `train(TrainConfig(...))`, which the command line's `train` calls."""

from liger_models.training.config import TrainConfig
from liger_models.training.loop import TrainingInterrupted, TrainResult, train
from liger_models.training.state import newest_checkpoint

__all__ = ["TrainConfig", "TrainResult", "TrainingInterrupted", "newest_checkpoint", "train"]
