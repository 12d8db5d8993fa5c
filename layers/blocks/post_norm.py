"""Blocks whose norms come after the branches only, or after their sums with the stream."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, Streams, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class PostNormBlock(Block):
    """`h = x + norm(attention(x)); y = h + norm(mlp(h))` (OLMo 2, arXiv:2501.00656, section 3.2): OLMo 2 and
    3, EXAONE 4.
    """

    norms_after_branches = 2

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x = x if residual is None else x + residual
        x = x + self._scaled(self.post_attention_layernorm(self.token_mixer(x, sequences)))
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, sequences))), x

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2  # inputs of the branches, which have no norm before them


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
