"""Training: `train(TrainConfig(...))`, which the command line's `train` calls.

May import models, losses, optim and its own subpackages, which never import this folder's modules.
"""

from liger_models.training.callbacks import Callback
from liger_models.training.checkpoints.state import newest_checkpoint
from liger_models.training.config import TrainConfig
from liger_models.training.loop import TrainingInterrupted, TrainResult
from liger_models.training.starting import train

__all__ = ["Callback", "TrainConfig", "TrainResult", "TrainingInterrupted", "newest_checkpoint", "train"]
