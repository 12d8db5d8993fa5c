"""Light convolution of a conformer: mixes the frames of a clip, channel by channel.

    a, b = split(x @ W_in^T)
    y = act(norm(clip(conv(a * sigmoid(b))))) @ W_out^T

or, if it is separable, with convolutions of one frame W, which have biases as everything here:

    a, b = split(W_in(x))
    y = W_out(act(W(conv((a + b_1) * gate(b + b_2)))))

The convolution is kernels/recurrent/short_conv.py, causal and depthwise, and restarts at every clip. If it is
centred, it is that of torch (centred_conv.py), and a batch norm with stored moments follows (batch_norm.py).
`lean` keeps a, b and the convolution's output, and W's, or which of its elements were clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.conformer.batch_norm import StoredBatchNorm
from liger_models.layers.conformer.centred_conv import CentredConvolution
from liger_models.layers.conformer.clip import clip
from liger_models.layers.conformer.clip_attention import lengths_of
from liger_models.layers.conformer.pointwise import PointwiseConvolution
from liger_models.layers.parts.mlp import gated_product, plain_activation
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.clipped_linear import ClippedLinear
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import LightConvSpec


class LightConvolution(nn.Module):
    """Convolution over the frames of each clip.

    Args:
        hidden_size: the width D of the hidden states.
        spec: the width of the convolution, its norm and activation.
        layer: the index of the layer; unused.
        backend: of attention; unused.
    """

    def __init__(
        self, hidden_size: int, spec: LightConvSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec, self.channels = spec, spec.expansion * hidden_size
        channels = self.channels
        self.conv1d: nn.Module
        if spec.centred:
            self.conv1d = CentredConvolution(channels, spec.width, spec.bias and spec.depthwise_bias)
        else:
            self.conv1d = ShortConvolution(((1, hidden_size),), spec.width, spec.separable, activation=None)
        self.activation = plain_activation(spec.activation)
        self.gated: Callable[..., Tensor] = F.glu
        self.in_proj: nn.Module
        self.out_proj: nn.Module
        if spec.separable:
            self.in_proj = PointwiseConvolution(hidden_size, 2 * hidden_size)
            self.gate = BiasedGate(hidden_size, spec.gate)
            self.gated = self.gate.product
            self.pointwise = PointwiseConvolution(hidden_size, hidden_size)
            self.out_proj = PointwiseConvolution(hidden_size, hidden_size)
        elif spec.centred:
            self.in_proj = PointwiseConvolution(hidden_size, 2 * channels, bias=spec.bias)
            self.batch_norm = StoredBatchNorm(channels)
            self.out_proj = PointwiseConvolution(channels, hidden_size, bias=spec.bias)
        else:
            linear = ClippedLinear if spec.clipped else Linear
            self.in_proj = linear(hidden_size, 2 * hidden_size, bias=False)
            self.norm: Any = make_norm(hidden_size, spec.norm)
            self.out_proj = linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [F, D] -> [F, D]."""
        gates = self.in_proj(x)
        gates = self.gate(gates) if self.spec.separable else gates
        gated = carry_recipe(self.gated(gates), self.gated, gates, late=True)
        y = self._convolved(gated, sequences)
        if self.spec.separable:
            y = self.pointwise(y)
        else:
            y = self.batch_norm(y) if self.spec.centred else self.norm(clip(y, self.spec.bound))
        return self.out_proj(carry_recipe(self.activation(y), self.activation, y, late=True, deep=True))

    def _convolved(self, gated: Tensor, sequences: Sequences) -> Tensor:
        """[F, D] -> [F, D]."""
        if not self.spec.centred:
            (y,) = self.conv1d(gated, None, sequences.documents.bounds())
            return y.flatten(1)
        if sequences.unseen is not None:
            gated = gated.masked_fill(sequences.unseen[:, None], 0)
        return self.conv1d(gated, lengths_of(sequences))

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: sounds are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame: a and b, the norm's input and 1/rms, and which elements were clipped, or the
        convolution's output and the input of the activation, or the centred one's input and the norm's input
        and output; with `all` also the gated input, the norm's output, and the activation's.
        """
        if self.spec.separable:
            return itemsize * self.channels * (6 if level == "all" else 4)
        norm = self.batch_norm if self.spec.centred else self.norm
        own: int = norm.activation_bytes(level, itemsize)
        own += 0 if self.spec.bound is None else self.channels
        lean = 4 if self.spec.centred else 2
        return own + itemsize * self.channels * (5 if level == "all" else lean)

    def extra_repr(self) -> str:
        return f"{self.channels} channels, width={self.spec.width}"


class BiasedGate(nn.Module):
    """Biases of a gate and of its factor, and their product.

    Args:
        channels: their number C.
        activation: of the gate.
    """

    def __init__(self, channels: int, activation: str):
        super().__init__()
        self.b1, self.b2 = (nn.Parameter(torch.empty(1, channels, 1)) for _ in range(2))
        self._product = gated_product(activation)

    def forward(self, gates: Tensor) -> Tensor:
        """a | b [F, 2 C] plus the biases."""
        return gates + torch.cat([self.b1, self.b2], 1).flatten().to(gates.dtype)

    def product(self, gates: Tensor) -> Tensor:
        """`a * act(b)`, [F, C]."""
        factor, gate = gates.chunk(2, dim=-1)
        return self._product(gate, factor)

    def reset_parameters(self, *_: object) -> None:
        """Initialise to zero, as the reference does."""
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)
