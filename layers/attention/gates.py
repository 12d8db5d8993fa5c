"""Gates of attention's output, by channel or by head."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.recompute.activation_memory import carry_recipe


def gated(out: Tensor, gate: Tensor | None) -> Tensor:
    """The output of attention [T, q_size] times the sigmoid of a gate, [T, q_size] or [T, heads]."""
    if gate is None:
        return out
    open_by = gate.sigmoid()
    return carry_recipe(_by_head(out, open_by), _by_head, out, open_by)


def _by_head(out: Tensor, factors: Tensor) -> Tensor:
    """[T, q_size] times [T, q_size] or [T, heads]."""
    return (out.unflatten(-1, (factors.shape[-1], -1)) * factors.unsqueeze(-1)).flatten(1)
