"""The scaled sandwich block with experts next to its MLP."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.scaled_sandwich import ScaledSandwichBlock
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class ScaledSandwichWithExpertsBlock(ScaledSandwichBlock):
    """The same with experts in parallel to the MLP, `norm(norm(mlp(norm(h))) + norm(experts(norm(h))))`; the
    router reads h itself (Gemma 4).
    """

    has_room_for = (*ScaledSandwichBlock.has_room_for, "experts")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if spec.experts is None:
            raise ValueError(f"layers of topology {spec.topology!r} have experts, and this spec has none")
        self.moe = MixtureOfExperts(hidden_size, spec.experts)
        self.post_feedforward_layernorm_1 = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm_2 = make_norm(hidden_size, spec.norm)
        self.pre_feedforward_layernorm_2 = make_norm(hidden_size, spec.norm)

    def _feed(self, x: Tensor, residual: Tensor, sequences: Sequences) -> Tensor:
        dense = self.post_feedforward_layernorm_1(self.mlp(x, sequences))
        routed = self.moe(self.pre_feedforward_layernorm_2(residual), sequences, residual)
        return dense + self.post_feedforward_layernorm_2(routed)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        # Two norms share one input; the output of the experts' norm is kept.
        return super()._branch_inputs(level) - 1 + (1 if level == "all" else 0)
