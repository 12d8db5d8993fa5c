"""Optimizers that keep bfloat16 weights exact: `AdamW`, and its state in the memory of the host."""

from liger_models.optim.adamw import AdamW

__all__ = ["AdamW"]
