"""The recurrent block of Griffin: RecurrentGemma (De et al., 2024, arXiv:2402.19427, section 2.3).

    y, u = split(x @ W_in^T + b);   u = conv(u)
    gates = u @ W_gates, head by head
    h = rg_lru(u, gates);           out = (gelu(y) * h) @ W_o^T + b

The scan is kernels/recurrent/rg_lru.py, which adds the gates' biases in float32. Both gates of a head are one
product. State and convolution restart at every document.

`lean` keeps y, u before the convolution, the gates before their biases, and h. The convolution and the gated
product run again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from liger_models.kernels import rg_lru, rg_lru_step
from liger_models.kernels.recurrent._chunk_table import ChunkTables
from liger_models.kernels.recurrent._rg_lru_pieces import GROUP_OF_GRADS, PIECE
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.parts.mlp import gated_product
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import WHOLE, Share, ShortConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import RGLRUSpec

SLOWEST, FASTEST = 0.9, 0.999  # decays of fresh weights with an open gate, by the power of 8 (section 2.4)


class RGLRU(RecurrentMixer):
    """Real-gated linear recurrence over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads of the gates, convolution and activation.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    stacked_vectors = ("input_gate_bias", "recurrent_gate_bias")

    def __init__(self, hidden_size: int, spec: RGLRUSpec, layer: int = 0, backend: AttentionBackend = "auto"):
        super().__init__(layer)
        self.spec, heads, width = spec, spec.heads, spec.head_dim
        self.in_proj = PackedLinear(hidden_size, {"linear_y": spec.size, "linear_x": spec.size}, bias=True)
        self.conv1d = ShortConvolution(((heads, width),), spec.conv, bias=True, activation=None)
        self.input_gate_weight, self.recurrent_gate_weight = (
            nn.Parameter(torch.empty(heads, width, width)) for _ in range(2)
        )
        self.input_gate_bias, self.recurrent_gate_bias = (
            nn.Parameter(torch.empty(heads, width)) for _ in range(2)
        )
        self.recurrent_param = nn.Parameter(torch.empty(spec.size))
        self.out_proj = Linear(spec.size, hidden_size, bias=True)
        self.product = gated_product(spec.activation)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw gates' matrices from a normal distribution, and decays uniformly, by their squares, between
        bounds; biases are zero. Projections are modules of their own.
        """
        for weight in (self.input_gate_weight, self.recurrent_gate_weight):
            nn.init.normal_(weight, 0.0, std, generator)
        nn.init.zeros_(self.input_gate_bias)
        nn.init.zeros_(self.recurrent_gate_bias)
        with torch.no_grad():  # softplus is minus the logarithm of the decay
            nn.init.uniform_(self.recurrent_param, SLOWEST**2, FASTEST**2, generator)
            self.recurrent_param.log_().mul_(-0.5).expm1_().log_()

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        y, u = self.split(self.in_proj(x), [self.spec.size] * 2, sequences)
        h = self.mix(u, (), sequences).flatten(1)
        return self.out_proj(carry_recipe(self.product(y, h), self.product, y, h, late=True).to(x.dtype))

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        u, logits, bias, decay = self._operands(parts[0], share)
        return rg_lru(u, logits, bias, decay, cu_seqlens=documents, state=state, tables=tables)

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        u, logits, bias, decay = self._operands(parts[0])
        return rg_lru_step(u, logits, bias, decay, state)

    def _operands(self, u: Tensor, share: Share = WHOLE) -> tuple[Tensor, ...]:
        """u [T, heads, width], both gates [T, heads, 2, width], their biases, and the decays."""
        weights: tuple[Tensor, ...] = self.input_gate_weight, self.recurrent_gate_weight
        biases: tuple[Tensor, ...] = self.input_gate_bias, self.recurrent_gate_bias
        decay: Tensor = self.recurrent_param
        if share != WHOLE:
            weights, biases = self.own_share(share, *weights), self.own_share(share, *biases)
            (decay,) = self.own_share(share, decay)
        joined = functools.partial(_joined, dtype=u.dtype)
        weight = carry_recipe(joined(*weights), joined, *weights, late=True)
        by_head = carry_recipe(_by_head(u), _by_head, u, late=True, deep=True)
        gates = torch.bmm(by_head, weight).unflatten(-1, (2, -1)).transpose(0, 1)
        return u, gates, carry_recipe(_stacked(*biases), _stacked, *biases, late=True), decay

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.spec.size + 1,)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: y, u before the convolution, both gates and h; with `all` also u
        after it and the gated product; and in float32 the states between pieces.
        """
        return self.spec.size * itemsize * (7 if level == "all" else 5) + 4 * self.spec.size // PIECE

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the scan on a GPU, in addition to what `lean`
        keeps, less h, which is freed by then: gradients of y and h, u after the convolution and its gradient,
        those of both gates; in float32 five numbers for each piece, and its states between groups of tokens.
        """
        return self.spec.size * 5 * itemsize + 4 * self.spec.size * (5 + PIECE // GROUP_OF_GRADS) // PIECE

    def extra_repr(self) -> str:
        return f"{self.spec.heads} heads of {self.spec.head_dim} channels"


def _joined(*weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[heads, width, width] of each gate -> [heads, width, 2 * width]."""
    return torch.cat(weights, dim=-1).to(dtype)


def _stacked(*biases: Tensor) -> Tensor:
    """[heads, width] of each gate -> [heads, 2, width]."""
    return torch.stack(biases, dim=1)


def _by_head(u: Tensor) -> Tensor:
    return u.transpose(0, 1)
