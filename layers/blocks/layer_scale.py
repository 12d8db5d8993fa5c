"""The pre-norm block whose branches are scaled channel by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Streams, add_and_norm
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class ChannelScale(nn.Module):
    """Per-channel learned scale of a branch.

    Args:
        hidden_size: the width H.
        initial: its initial value.
    """

    def __init__(self, hidden_size: int, initial: float):
        super().__init__()
        self.weight, self.initial = nn.Parameter(torch.empty(hidden_size)), initial

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return x * self.weight.to(x.dtype)

    def reset_parameters(self, *_: Any) -> None:
        """Set the scale to its initial value, regardless of how matrices are initialised."""
        nn.init.constant_(self.weight, self.initial)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token: its input."""
        return itemsize * self.weight.numel()


class LayerScaleBlock(PreNormBlock):
    """`h = x + a * attention(norm(x)); y = h + b * mlp(norm(h))`, a and b learned for each channel
    (LayerScale; Touvron et al., 2021, arXiv:2103.17239): the encoders of InternVL and C-RADIO.
    """

    supports: tuple[str, ...] = ()

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.attention_scale = ChannelScale(hidden_size, spec.initial_scale)
        self.mlp_scale = ChannelScale(hidden_size, spec.initial_scale)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.attention_scale(self.token_mixer(x, sequences)))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self._scaled(self.mlp_scale(self.mlp(x, sequences))), residual
