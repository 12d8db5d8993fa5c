"""Light convolution of a conformer: mixes the frames of a clip, channel by channel.

    a, b = split(x @ W_in^T)
    y = act(norm(clip(conv(a * sigmoid(b))))) @ W_out^T

The convolution is kernels/recurrent/short_conv.py, causal and depthwise, and restarts at every clip. `lean`
keeps a, b and the convolution's output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.conformer.clip import clip
from liger_models.layers.parts.mlp import plain_activation
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
        self.spec, self.channels = spec, hidden_size
        linear = ClippedLinear if spec.clipped else Linear
        self.in_proj = linear(hidden_size, 2 * hidden_size, bias=False)
        self.conv1d = ShortConvolution(((1, hidden_size),), spec.width, activation=None)
        self.norm = make_norm(hidden_size, spec.norm)
        self.activation = plain_activation(spec.activation)
        self.out_proj = linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [F, D] -> [F, D]."""
        gates = self.in_proj(x)
        gated = carry_recipe(F.glu(gates), F.glu, gates, late=True)
        (y,) = self.conv1d(gated, None, sequences.documents.bounds())
        y = self.norm(clip(y.flatten(1), self.spec.bound))
        return self.out_proj(carry_recipe(self.activation(y), self.activation, y, late=True, deep=True))

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: sounds are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame: a and b, the norm's input and 1/rms; with `all` also the gated input, the
        norm's output and the activation's.
        """
        own = self.norm.activation_bytes(level, itemsize)
        return own + itemsize * self.channels * (5 if level == "all" else 2)

    def extra_repr(self) -> str:
        return f"{self.channels} channels, width={self.spec.width}"
