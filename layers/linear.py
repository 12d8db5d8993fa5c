"""A projection: `x @ W^T + b`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """torch's linear layer, but that its bias may be wider than its matrix, as some checkpoints hold it."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return project(x, self.weight, self.bias)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] -> [..., out] with weight [out, in] and bias [out]."""
    return F.linear(x, weight, as_wide_as(weight, bias))


def as_wide_as(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias in the dtype of the matrix beside it."""
    return None if bias is None else bias.to(weight.dtype)
