"""Blocks whose attention and MLP run in parallel, after one norm or two."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, Streams, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class ParallelBlock(Block):
    """`n = norm(x); y = x + attention(n) + mlp(n)` (GPT-J, 2021; PaLM, arXiv:2204.02311): Cohere, Phi."""

    supports: tuple[str, ...] = ("dropout",)

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        mixed = self._dropped(self.token_mixer(x, sequences))
        return self._scaled(mixed + self._dropped(self.mlp(x, sequences))), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 1 if level == "all" else 0


class ParallelTwoNormsBlock(Block):
    """`y = x + attention(norm_a(x)) + mlp(norm_m(x))` (GPT-NeoX, arXiv:2204.06745, section 2.1): GPT-NeoX and
    Pythia, Falcon 40B and 180B.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.attention_norm = make_norm(hidden_size, spec.norm)
        self.mlp_norm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.attention_norm, x, residual)
        mlp = self.mlp(self.mlp_norm(residual), sequences)
        return self._scaled(self.token_mixer(x, sequences) + mlp), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return (2 if level == "all" else 0) - 1  # both norms keep the same input
