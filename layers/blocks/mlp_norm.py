"""The block whose MLP alone has a norm."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import add_and_norm
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class MLPNormBlock(PreNormBlock):
    """`h = x + attention(x); y = h + mlp(norm(h))`: the first layer of ModernBERT (arXiv:2412.13663), whose
    input, the embedding, was normalised.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        del self.input_layernorm

    def _attended(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        return add_and_norm(
            self.post_attention_layernorm, self._of_part(0, self.token_mixer, x, sequences), x
        )

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 1  # attention's own input
