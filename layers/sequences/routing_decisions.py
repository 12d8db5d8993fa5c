"""A token's experts are chosen once, though its layer may run twice.

A layer that runs again in the backward pass (the level `checkpoint`, torch's checkpoint around a layer) runs
its router again. Matrix products may round otherwise the second time, and of two experts that are nearly
equal the other one would win: the gradients would be those of another function than was computed. So a router
notes its choice in the `RoutingDecisions` of the call (they travel on `Sequences`), and the second run weighs
the experts of the first. They are 4 bytes for each of a token's experts, and nothing waits for the device.
What a router drew at random is kept with them.

Who runs a whole model again, or a layer of experts without its `Sequences`, or compiles a layer, lets the
router choose again: by the same rule, from logits that are the same but for their rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RoutingDecisions:
    """What each router decided in one call of a model: tensors without gradients, such as experts [T, k]."""

    def __init__(self) -> None:
        self._made: dict[nn.Module, tuple[Tensor, ...] | None] = {}

    def note(self, router: nn.Module, *decision: Tensor) -> None:
        """Keep a choice that was made in the forward pass, if a backward pass may follow."""
        if torch.compiler.is_compiling() or in_backward_pass():
            return
        if torch.is_grad_enabled() or router.training:  # reentrant checkpoints run without gradients first
            # A router that two layers share chooses twice, and which layer it is that runs again is not seen.
            self._made[router] = None if router in self._made else decision

    def made_by(self, router: nn.Module) -> tuple[Tensor, ...] | None:
        """The choice that was made in the forward pass, for the backward pass alone."""
        return self._made.get(router) if in_backward_pass() else None


def in_backward_pass() -> bool:
    """Whether it is autograd that runs this: a layer is computed again for its gradients."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
