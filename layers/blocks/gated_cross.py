"""The gated block in which text attends to images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import IMAGES, Block, Streams, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class GatedCrossBlock(Block):
    """`h = x + tanh(a) * attention(norm(x), images); y = h + tanh(b) * shown * mlp(norm(h))`, a and b
    learned, and `shown` 0 for tokens with no preceding image (Llama 3.2 Vision).
    """

    reads = (IMAGES,)
    supports = ("features of images",)

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, images: Tensor) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.cross_attn_attn_gate.tanh() * self.token_mixer(x, sequences, images))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        seen = sequences.on(x.device).visibility.tiles
        assert seen is not None
        x = torch.where(seen.shown, self.mlp(x, sequences), 0)
        return self._scaled(self.cross_attn_mlp_gate.tanh() * x), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 4 if level == "all" else 2  # inputs of the gates

    def reset_parameters(self, *_: Any) -> None:
        """Close the gates, so that the language model is unchanged."""
        nn.init.zeros_(self.cross_attn_attn_gate)
        nn.init.zeros_(self.cross_attn_mlp_gate)
