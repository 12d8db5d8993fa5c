"""Gates of attention's output, by channel or by head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.recompute.activation_memory import carry_recipe


def gated(out: Tensor, gate: Tensor | None, softplus: bool = False) -> Tensor:
    """The output of attention [T, o_size] times the sigmoid of a gate, [T, o_size] or [T, heads], or its
    softplus in float32.
    """
    if gate is None:
        return out
    open_by = F.softplus(at_least_float32(gate)).to(gate.dtype) if softplus else gate.sigmoid()
    return carry_recipe(_by_head(out, open_by), _by_head, out, open_by)


def _by_head(out: Tensor, factors: Tensor) -> Tensor:
    """[T, o_size] times [T, o_size] or [T, heads]."""
    return (out.unflatten(-1, (factors.shape[-1], -1)) * factors.unsqueeze(-1)).flatten(1)
