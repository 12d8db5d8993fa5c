"""The block with only one part: a mixer, an MLP or experts."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, Streams, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class OnePartBlock(Block):
    """`y = x + part(norm(x))`, the part being a mixer, an MLP or experts (Mamba 2, arXiv:2405.21060;
    Nemotron-H, arXiv:2504.03624, section 2.1).
    """

    needs = ()

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if (spec.mixer is None) == (spec.mlp is None):
            raise ValueError("layers of topology 'one_part' have a mixer or an MLP; found both, or neither")
        self.norm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.norm, x, residual)
        part = self.token_mixer if self.mixers else self.mlp
        return self._branch_of(part, x, sequences), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 1 if level == "all" else 0
