"""The block of the first transformers: a norm after each sum."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class NormedSumsBlock(Block):
    """`h = norm(x + attention(x)); y = norm(h + mlp(h))` (Vaswani et al., 2017, arXiv:1706.03762, section
    3.1): GPT-1. The residual stream is the output of a norm, and needs none after the last layer.
    """

    supports: tuple[str, ...] = ("dropout",)

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> tuple[Tensor, None]:
        x = x if residual is None else x + residual
        mixed = self._scaled(self._dropped(self.token_mixer(x, sequences)))
        x = add_and_norm(self.post_attention_layernorm, mixed, x)[0]
        fed = self._scaled(self._dropped(self.mlp(x, sequences)))
        return add_and_norm(self.post_feedforward_layernorm, fed, x)[0], None

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0
