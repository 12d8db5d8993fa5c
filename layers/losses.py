"""Losses as modules, for use in any model. Formulas and options: kernels/cross_entropy.py,
kernels/linear_cross_entropy.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from liger_models.kernels import cross_entropy, linear_cross_entropy


class LigerCrossEntropyLoss(nn.Module):
    """Cross entropy of logits, in float32, in three passes over them.

    Args:
        ignore_index: labels of this value do not count.
        reduction: "mean" over the labels that count, "sum", or "none".
        **options: those of `kernels.cross_entropy`: label_smoothing, z_loss, softcap and so on.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", **options: Any):
        super().__init__()
        self.options = {"ignore_index": ignore_index, "reduction": reduction, **options}

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """input [N, C] (or [N, C, d...]), target [N] (or [N, d...]) -> float32 scalar, or [N] for "none"."""
        return cross_entropy(input, target, **self.options)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of `input @ weight.T + bias`, whose logits never exist at once.

    Args:
        ignore_index: labels of this value do not count, and cost nothing.
        reduction: "mean" over the labels that count, "sum", or "none".
        **options: those of `kernels.linear_cross_entropy`: label_smoothing, z_loss, softcap and so on.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", **options: Any):
        super().__init__()
        self.options = {"ignore_index": ignore_index, "reduction": reduction, **options}

    def forward(self, weight: Tensor, input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """weight [V, H], input [T, H], target [T], bias [V] -> float32 scalar, or [T] for "none"."""
        return linear_cross_entropy(input, weight, target, bias, **self.options)
