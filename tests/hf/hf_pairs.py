"""One of our models in transformers beside transformers' own, and how far apart their results are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounding import BOUND as BOUND
from rounding import relative_distance as relative_distance
from torch import Tensor


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of a model, by the names of its checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", {})
    named = {name: p.grad for name, p in model.named_parameters() if name not in tied}
    return revert_weight_conversion(model, named)


@dataclass
class Both:
    """transformers' own model, the folder to which it was saved, and ours that was read from there."""

    reference: Any
    folder: Path
    ours: Any
