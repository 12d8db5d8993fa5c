"""Optimizers with exact bfloat16 weights: `AdamW`, optionally with its state in host memory."""

from liger_models.optim.adamw import AdamW

__all__ = ["AdamW"]
