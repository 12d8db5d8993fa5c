"""Training: `train(TrainConfig(...))`, which the command line's `train` calls."""

from liger_models.training.checkpoints.state import newest_checkpoint
from liger_models.training.config import TrainConfig
from liger_models.training.loop import TrainingInterrupted, TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "TrainingInterrupted", "newest_checkpoint", "train"]
