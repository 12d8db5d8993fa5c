"""Experts of every token next to the chosen ones, with weights from the same router (Inkling, 2026).

    y = sum of w_e * expert_e(x) over the chosen experts + sum of w_s * sink_s(x) over the sinks

The weights share one softmax: `SinkRouter` in layers/experts/router.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.layers.experts.moe import Experts, MixtureOfExperts
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MoESpec


class SinkExperts(MixtureOfExperts):
    """A mixture with sinks.

    Args:
        hidden_size: the width H of input and output.
        spec: the experts, the routing, the number of sinks.

    Raises:
        ValueError: experts without gates, with biases, in a latent space, or of pictures.
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__(hidden_size, spec)
        if not spec.gated or spec.bias or spec.latent_size is not None:
            raise ValueError(
                f"sink_experts have gates, no biases, and the width of hidden states; found {spec}"
            )
        self.sinks = Sinks(hidden_size, replace(spec, num_experts=spec.sink_experts, sink_experts=0))

    def routed(
        self,
        x: Tensor,
        sequences: Sequences | None,
        routed_by: Tensor,
        meanwhile: Callable[[], object] | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output of chosen experts and sinks for x [T, H], and the logits [T, E] of the former."""
        notes = None if sequences is None else sequences.notes.routing
        logits, weights, experts = self.router(routed_by, notes, ids)
        own, of_sinks = weights.split([self.spec.experts_per_token, self.spec.sink_experts], dim=1)
        y = self.experts(x, own, experts, sequences, meanwhile)
        every = torch.arange(self.spec.sink_experts, dtype=torch.int32, device=x.device)
        y = y + self.sinks(x, of_sinks, every.expand(len(x), -1), sequences)
        return y, logits[:, : self.spec.num_choices]

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token: those of a mixture, and those of the sinks."""
        return super().activation_bytes(level, itemsize) + self.sinks.activation_bytes(level, itemsize)


class Sinks(Experts):
    """MLPs of one size that all compute every token.

    Args:
        hidden_size: the width H of input and output.
        spec: number, size and activation of the MLPs.
    """

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__(hidden_size, replace(spec, experts_per_token=spec.num_experts))

    def canonical_form(self, path: str, name: str) -> Expr:
        """Stacks of all sinks: gate_proj, up_proj and down_proj."""
        sinks, rows, width = shape_of(self.get_parameter(name))
        if name == "down_proj":
            return Ref(f"{path}.{name}", (sinks, rows, width))
        parts = (Ref(f"{path}.{part}", (sinks, rows // 2, width)) for part in ("gate_proj", "up_proj"))
        return Cat(tuple(parts), dim=1)
