"""Models with trainable adapters."""

from __future__ import annotations

from typing import Any

import torch

from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters


def with_adapters(model: Any, settings: str = "r=4") -> Any:
    """Add random adapters, the same in every process, to a model with split projections."""
    model = Adapters(model, LoraSettings.parse(settings), "", seed=0).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model
