"""Integration with transformers: after `register()`, its loaders and trainers use our models.

Only this package imports transformers, and it may import everything else; its modules are imported on first
use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_models.hf.adapters.adapters import load_adapter, save_adapter
    from liger_models.hf.adapters.state_spaces import get_peft_model
    from liger_models.hf.base_model import LigerModel
    from liger_models.hf.callbacks import CorrectionBiasCallback
    from liger_models.hf.families import classes_of, register, unregister
    from liger_models.hf.models import LigerForCausalLM, LigerForSequenceClassification
    from liger_models.hf.shared_prompts import SharedPromptsMixin
    from liger_models.hf.vision import LigerForConditionalGeneration

__all__ = [
    "CorrectionBiasCallback",
    "LigerForCausalLM",
    "LigerForConditionalGeneration",
    "LigerForSequenceClassification",
    "LigerModel",
    "SharedPromptsMixin",
    "classes_of",
    "get_peft_model",
    "load_adapter",
    "register",
    "save_adapter",
    "unregister",
]

_HOMES = {
    **dict.fromkeys(("load_adapter", "save_adapter"), "adapters.adapters"),
    "get_peft_model": "adapters.state_spaces",
    "CorrectionBiasCallback": "callbacks",
    "LigerModel": "base_model",
    "SharedPromptsMixin": "shared_prompts",
    **dict.fromkeys(("LigerForCausalLM", "LigerForSequenceClassification"), "models"),
    "LigerForConditionalGeneration": "vision",
    **dict.fromkeys(("classes_of", "register", "unregister"), "families"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ImportError as error:
        raise ImportError(_what_to_do(error)) from error
    return getattr(home, name)


def _what_to_do(error: ImportError) -> str:
    try:
        from transformers import __version__
    except ImportError:
        return f"liger_models.hf requires transformers ({error}): pip install liger_models[hf]"
    return (
        f"transformers {__version__} lacks names that liger_models.hf uses ({error}); install another one "
        "(docs/frameworks.md names those that were tested), or a newer liger_models"
    )


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys())
