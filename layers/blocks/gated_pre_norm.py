"""The pre-norm block with a learned gate on each branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Streams, add_and_norm
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class GatedPreNormBlock(PreNormBlock):
    """`h = x + tanh(a) * attention(norm(x)); y = h + tanh(b) * mlp(norm(h))`, a and b learned (the encoder of
    Llama 3.2 Vision).
    """

    supports: tuple[str, ...] = ()

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.gate_attn, self.gate_ffn = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.gate_attn.tanh() * self.token_mixer(x, sequences))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self._scaled(self.gate_ffn.tanh() * self.mlp(x, sequences)), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return super()._branch_inputs(level) + 2  # inputs of the gates

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the gates like matrices."""
        for gate in (self.gate_attn, self.gate_ffn):
            nn.init.normal_(gate, 0.0, std, generator)
