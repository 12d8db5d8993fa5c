"""One of our models in transformers beside transformers' own, and how far apart their results are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

# As in tests/architectures/pairs.py, where it is derived: float32 rounds 6e-8, through a hundred roundings
# and sums in which much cancels.
BOUND = 1e-5


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; NaN counts as infinitely far."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double(), expected.detach().double()
    distance, size = (found - expected).norm().item(), expected.norm().item()
    return math.inf if math.isnan(distance) else distance / (size or 1.0)


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
