"""Pairs of our model and transformers' own, and the distances of their results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounding import BOUND as BOUND
from rounding import relative_distance as relative_distance
from torch import Tensor


def gradients(model: Any) -> dict[str, Tensor]:
    """Return a model's gradients under checkpoint names."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", {})
    named = {name: p.grad for name, p in model.named_parameters() if name not in tied}
    return revert_weight_conversion(model, named)


@dataclass
class Both:
    """transformers' own model, its saved checkpoint folder, and our model loaded from it."""

    reference: Any
    folder: Path
    ours: Any
