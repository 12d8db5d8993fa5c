"""Optimizers with exact bfloat16 weights: `AdamW`, optionally with its state in host memory.

May import the kernels and the shards of checkpoints; knows no model.
"""

from liger_models.optim.adamw import AdamW

__all__ = ["AdamW"]
