"""Expert choices that a recomputed layer reuses.

A layer that runs again in the backward pass (the level `checkpoint`, torch's checkpoint around a layer) runs
its router again. Matrix products may round differently the second time and swap two nearly equal experts, so
that the gradients would belong to another function than the one computed. A router therefore notes its choice
in the `RoutingDecisions` of the call (`Sequences.notes`), and the second run weighs the experts of the first.
This takes 4 bytes for each of a token's experts and no synchronisation. Random draws of a router are kept
too.

If a whole model runs again, or a layer of experts runs without its `Sequences` or is compiled, the router
chooses again, by the same rule, from logits that differ only in their rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RoutingDecisions:
    """The decisions of each router in one call: tensors without gradients, such as experts [T, k].

    Attributes:
        given: experts [T, k] int32 to use, by router, instead of its own choice; a token with -1 keeps that.
        seen: experts [T, k] that each router used, if they are asked for; else None.
    """

    def __init__(self) -> None:
        self._made: dict[nn.Module, tuple[Tensor, ...] | None] = {}
        self.given: dict[nn.Module, Tensor] = {}
        self.seen: dict[nn.Module, Tensor] | None = None

    def note(self, router: nn.Module, *decision: Tensor) -> None:
        """Keep a choice made in the forward pass, if a backward pass may follow."""
        if torch.compiler.is_compiling() or in_backward_pass():
            return
        if self.seen is not None:
            self.seen[router] = decision[0]
        if torch.is_grad_enabled() or router.training:  # reentrant checkpoints run without gradients first
            # A router shared by two layers chooses twice, and the layer that runs again is unknown.
            self._made[router] = None if router in self._made else decision

    def made_by(self, router: nn.Module) -> tuple[Tensor, ...] | None:
        """The choice made in the forward pass; None outside the backward pass."""
        return self._made.get(router) if in_backward_pass() else None


def in_backward_pass() -> bool:
    """Whether autograd runs this code to recompute a layer for its gradients."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
