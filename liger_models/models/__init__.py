"""User-facing models: loading, saving, generation and classification on top of `layers.model`.

May import architectures, layers and checkpoints; training, the command line and adapters import it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_models.models.base_model import LigerBaseModel
    from liger_models.models.causal_lm import LigerCausalLM
    from liger_models.models.classifier import LigerSequenceClassifier
    from liger_models.models.medusa import MedusaModel

__all__ = ["LigerBaseModel", "LigerCausalLM", "LigerSequenceClassifier", "MedusaModel"]

_HOMES = {
    "LigerBaseModel": "base_model",
    "LigerCausalLM": "causal_lm",
    "LigerSequenceClassifier": "classifier",
    "MedusaModel": "medusa",
}


def __getattr__(name: str) -> Any:  # imported on first use, with torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
