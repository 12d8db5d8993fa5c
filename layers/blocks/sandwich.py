"""The block with norms before and after each branch."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, Streams, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class SandwichBlock(Block):
    """`h = x + norm(attention(norm(x))); y = h + norm(mlp(norm(h)))` (Gemma 2, arXiv:2408.00118): Gemma 2 and
    3, GLM-4. The outer norms may have settings of their own (Muse Glimmer). Branches and streams may each be
    multiplied by one of the `branch_scales` and of the `stream_scales` (Beam).
    """

    supports: tuple[str, ...] = ("branch_norm", "branch_scales", "stream_scales")
    norms_after_branches = 2

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        outer = spec.norm if spec.branch_norm is None else spec.branch_norm
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, outer)
        self.pre_feedforward_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, outer)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.post_attention_layernorm(self.token_mixer(x, sequences)))
        x, residual = self._weighed(0, x, residual)
        x, residual = add_and_norm(self.pre_feedforward_layernorm, x, residual)
        x = self._scaled(self.post_feedforward_layernorm(self.mlp(x, sequences)))
        return self._weighed(1, x, residual)

    def _weighed(self, number: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A branch and the stream before their sum, times their factors."""
        branch, stream = self.spec.branch_scales[2 * number], self.spec.stream_scales[number]
        return x if branch == 1.0 else x * branch, residual if stream == 1.0 else residual * stream

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0
