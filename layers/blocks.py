"""How the parts of a layer are connected. A new topology is a new block, never a flag in an old one.

A block takes and returns the hidden states as two tensors, `x` and `residual`, whose sum is the residual
stream: the sum is taken inside the next norm, in one kernel. `residual` is None in front of the first block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.activation_memory import ActivationMemory, recompute
from liger_models.layers.attention_backends import AttentionBackend
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.self_attention import Attention
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import BlockSpec


class PreNormBlock(nn.Module):
    """`h = x + attention(norm(x)); y = h + mlp(norm(h))` (Xiong et al., 2020, arXiv:2002.04745): LLaMA,
    Mistral, Qwen.

    Args:
        hidden_size: the width H of the hidden states.
        spec: the layer's parts.
        layer: its place in the model.
        attention: the attention backend.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.input_layernorm = LigerRMSNorm.from_spec(hidden_size, spec.norm)
        self.self_attn = Attention(hidden_size, spec.attention, layer, attention)
        self.post_attention_layernorm = LigerRMSNorm.from_spec(hidden_size, spec.norm)
        self.mlp = GatedMLP(hidden_size, spec.mlp)
        self.activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] -> the MLP's output and the residual stream before it, [T, H] each."""
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self.self_attn(x, sequences)
        if self.activation_memory == "mlp" and torch.is_grad_enabled():
            return recompute(self._feed_forward, x, residual)
        return self._feed_forward(x, residual)

    def _feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self.mlp(x), residual


BLOCKS: dict[str, type[PreNormBlock]] = {"pre_norm": PreNormBlock}


def add_and_norm(norm: LigerRMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); in front of the first block there is nothing to add."""
    return (norm(x), x) if residual is None else norm(x, residual)  # type: ignore[return-value]
