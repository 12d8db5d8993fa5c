"""liger_models: language models for training, written natively over Triton kernels.

model = liger_models.from_hub("Qwen/Qwen3-0.6B", device="cuda")
model(input_ids, labels=input_ids).loss.backward()
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the code folders are next to this one, not in it, and belong to this checkout: without
# this line an editable install of another checkout, in whose place this one was found, would give its own.
if not (_here := Path(__file__).parent).joinpath("kernels").exists():
    __path__.append(str(_here.parent))

from liger_models.convert.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HubError,
    LigerModelsError,
    TrainingError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from liger_models.architectures import list_architectures
    from liger_models.kernels.invariant.mode import batch_invariant
    from liger_models.layers.experts.load_balance import update_correction_bias
    from liger_models.layers.model.distilling import Distillation
    from liger_models.layers.model.scoring import ScoreOptions
    from liger_models.losses.agreement import agreement
    from liger_models.models.base_model import LigerBaseModel
    from liger_models.models.causal_lm import LigerCausalLM
    from liger_models.models.classifier import LigerSequenceClassifier
    from liger_models.models.float8 import gather_in_float8, keep_float8_weights, set_float8
    from liger_models.models.loading import from_config, from_hub, from_pretrained
    from liger_models.models.streaming import stream_weights
    from liger_models.parallel.dims import ParallelDims
    from liger_models.parallel.sharding import parallelize
    from liger_models.presets import preset
    from liger_models.training.callbacks import Callback
    from liger_models.training.config import TrainConfig
    from liger_models.training.results import TrainingInterrupted, TrainResult
    from liger_models.training.starting import train

__version__ = "0.2.0"

__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Distillation",
    "HubError",
    "LigerBaseModel",
    "LigerCausalLM",
    "LigerModelsError",
    "LigerSequenceClassifier",
    "ParallelDims",
    "ScoreOptions",
    "TrainConfig",
    "TrainResult",
    "TrainingError",
    "TrainingInterrupted",
    "UnsupportedModelError",
    "agreement",
    "batch_invariant",
    "from_config",
    "from_hub",
    "from_pretrained",
    "gather_in_float8",
    "keep_float8_weights",
    "list_architectures",
    "parallelize",
    "preset",
    "set_float8",
    "stream_weights",
    "train",
    "update_correction_bias",
]

# Imported when first used: they bring torch along, for which `liger-models --help` should not wait.
_HOMES = {
    "Callback": "training.callbacks",
    "Distillation": "layers.model.distilling",
    "LigerBaseModel": "models.base_model",
    "LigerCausalLM": "models.causal_lm",
    "LigerSequenceClassifier": "models.classifier",
    "ParallelDims": "parallel.dims",
    "ScoreOptions": "layers.model.scoring",
    "TrainConfig": "training.config",
    "TrainResult": "training.results",
    "TrainingInterrupted": "training.results",
    "agreement": "losses.agreement",
    "batch_invariant": "kernels.invariant.mode",
    "from_config": "models.loading",
    "from_hub": "models.loading",
    "from_pretrained": "models.loading",
    "gather_in_float8": "models.float8",
    "keep_float8_weights": "models.float8",
    "list_architectures": "architectures",
    "parallelize": "parallel.sharding",
    "preset": "presets",
    "set_float8": "models.float8",
    "stream_weights": "models.streaming",
    "train": "training.starting",
    "update_correction_bias": "layers.experts.load_balance",
}
_PACKAGES = (
    "generating",
    "hf",
    "images",
    "kernels",
    "layers",
    "losses",
    "models",
    "optim",
    "parallel",
    "training",
)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
