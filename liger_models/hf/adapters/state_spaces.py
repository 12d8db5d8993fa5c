"""PEFT adapters on the output projections of state space layers.

PEFT refuses adapters on `out_proj` in models of Mamba's types, since the fused kernel that transformers runs
in training reads that layer's weight and would pass its adapter by. Our layers call the projection, so an
adapter acts there as anywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def get_peft_model(model: Any, peft_config: Any, **options: Any) -> Any:
    """Like PEFT's `get_peft_model`, for one of our models, with adapters on any of its linear layers, the
    `out_proj` of state space layers included.

    Args:
        model: one of our transformers models.
        peft_config: of PEFT, such as a LoraConfig that names its `target_modules`.
        options: of PEFT's function.
    """
    import peft

    return allowing_output_projections(model, lambda: peft.get_peft_model(model, peft_config, **options))


def allowing_output_projections(model: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, an adapted model, which may have adapters on every linear layer."""
    config = model.config
    if not model.base_decoder.spec.is_recurrent:
        return make()
    other = copy.copy(config)
    other.model_type = f"liger_{config.model_type}"  # PEFT looks for Mamba's types
    model.config = other
    try:
        adapted = make()
    finally:
        model.config = config
    adapted.config = config
    return adapted
