"""Gated short convolutions: LFM2.

    B, C, u = split(x @ W_in^T + b);   out = (C * conv(B * u)) @ W_o^T + b

The convolution is kernels/recurrent/short_conv.py, which also multiplies, and restarts at every document.
`lean` keeps B, C and u; both products and the convolution run again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedConvSpec


class GatedConvolution(RecurrentMixer):
    """Gated short convolution over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: channels, width of the convolution, biases.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    def __init__(
        self, hidden_size: int, spec: GatedConvSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__(layer)
        self.spec = spec
        self.in_proj = Linear(hidden_size, 3 * spec.channels, bias=spec.bias)
        self.conv1d = ShortConvolution(((spec.channels, 1),), spec.conv, spec.bias, activation=None)
        self.out_proj = Linear(spec.channels, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        projected, sequences = self.in_proj(x), sequences.on(x.device)
        if sequences.cache is None and sequences.slice is None and sequences.documents.tree is None:
            (gated,) = self.conv1d(projected, None, sequences.documents.bounds(), gated=True)
            return self.out_proj(gated)
        before, after, u = projected.chunk(3, dim=-1)
        inner = carry_recipe(before * u, torch.mul, before, u, late=True)
        convolved, after = self.mix(inner, (), sequences), after.unsqueeze(-1)  # [T, channels, 1]
        gated = carry_recipe(_gated(convolved, after), _gated, convolved, after, late=True, deep=True)
        return self.out_proj(gated)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: gates and u; with `all` also the gated output."""
        return itemsize * self.spec.channels * (4 if level == "all" else 3)

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass on a GPU, in addition to what `lean` keeps: the
        gradients of the gated output, of gates and of u.
        """
        return itemsize * self.spec.channels * 4

    def extra_repr(self) -> str:
        return f"{self.spec.channels} channels"


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """[T, channels, 1] each -> [T, channels]."""
    return (x * gate).squeeze(-1)
