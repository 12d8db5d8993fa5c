"""Linear attention by the delta rule with a decay for each channel: Kimi Linear, Ling 3.0.

    q, k, v, z, b = split(x @ W_in^T);   f = x @ W_f^T;   q, k, v = silu(conv(q, k, v))
    o = channel_delta_rule(q, k, v, f, b);                out = (norm(o) * sigmoid(z)) @ W_o^T

The matrices of f and z may be products of two narrow ones. The rule and its gates are in
kernels/recurrent/channel_delta_rule.py. State and convolution restart at every document.

Between the projections and the norm, `lean` keeps q, k, v before the convolution, f, b, z and o. The
convolution runs again in the backward pass. The states of chunks are never kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import channel_delta_rule, channel_delta_rule_step
from liger_models.kernels.recurrent._chunk_table import CHUNK, SEGMENT, ChunkTables
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.gated_norm import GatedNormalisation
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import WHOLE, Share, ShortConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ChannelDeltaSpec


class ChannelDelta(RecurrentMixer):
    """Delta rule with a decay for each channel, over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, convolution, and gates.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    transfers = "matrices"

    def __init__(
        self, hidden_size: int, spec: ChannelDeltaSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__(layer)
        self.spec = spec
        self.gate_width = spec.size if spec.gate_rank is None else spec.gate_rank
        gate = "g_proj" if spec.gate_rank is None else "g_a_proj"
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.size)
        self.in_proj = PackedLinear(hidden_size, {**parts, gate: self.gate_width, "b_proj": spec.heads})
        if spec.gate_rank is not None:
            self.g_b_proj = Linear(spec.gate_rank, spec.size, bias=False)
        names = ("q_conv1d", "k_conv1d", "v_conv1d")
        self.conv1d = ShortConvolution(((spec.heads, spec.head_dim),) * 3, spec.conv, names=names)
        self.forget_gate = ForgetGate(hidden_size, spec)
        self.o_norm = GatedNormalisation(spec.head_dim, spec.norm_eps, activation="sigmoid", cast="float32")
        self.o_proj = Linear(spec.size, hidden_size, bias=False)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        spec = self.spec
        widths = 3 * spec.size, self.gate_width, spec.heads
        qkv, z, b = self.split(self.in_proj(x), widths, sequences)
        if spec.gate_rank is not None:
            z = self.g_b_proj(z)
        o = self.mix(qkv, (self.forget_gate(x), b), sequences)
        return self.o_proj(self.o_norm(o.flatten(1), z))

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        (q, k, v), (f, b) = parts, gates
        by_head = self.own_share(share, *self._by_head())
        bound = self.spec.lower_bound
        options: dict[str, Any] = {"cu_seqlens": documents, "state": state, "tables": tables}
        return channel_delta_rule(q, k, v, f, b, *by_head, lower_bound=bound, **options)

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        (q, k, v), (f, b) = parts, gates
        bound = self.spec.lower_bound
        return channel_delta_rule_step(q, k, v, f, b, *self._by_head(), state, lower_bound=bound)

    def _by_head(self) -> tuple[Tensor, Tensor]:
        """A_log [heads] and dt_bias [heads, head_dim]."""
        gate = self.forget_gate
        return gate.A_log, gate.dt_bias.view(self.spec.heads, self.spec.head_dim)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.spec.heads, self.spec.head_dim, self.spec.head_dim

    @property
    def early_width(self) -> int:
        return 3 * self.spec.size if self.spec.gate_rank is None else 0

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, k and v before the convolution, f, b, z and o, and the narrow
        inputs of f and z; with `all` also q, k and v after the convolution and the norm's output; and in
        float32 the states between segments and how each segment changes them.
        """
        spec = self.spec
        narrow = (spec.forget_rank or 0) + (spec.gate_rank or 0)
        states = 8 * spec.size * spec.head_dim // SEGMENT
        return itemsize * ((10 if level == "all" else 6) * spec.size + spec.heads + narrow) + states

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the rule on a GPU, in addition to what `lean`
        keeps, less o, which the norm has freed, and z if it is not a part of a wider product: gradients of o
        and z; q, k and v after the convolution; the tokens' writes with what reads and solves them, and their
        gradients (later the gradients of q, k and f); per chunk two squares, and states with their gradients;
        and in float32 gates, gradients of q and k of a quarter of the heads, and those of states between
        segments.
        """
        spec = self.spec
        chunk = spec.heads * (2 * CHUNK + 2 * spec.head_dim * spec.head_dim / CHUNK)
        freed = (1 if spec.gate_rank is None else 2) * spec.size
        numbers = 1.5 * spec.size + 4 * spec.heads + spec.size * spec.head_dim / SEGMENT
        return int(itemsize * (10 * spec.size - freed + chunk) + 4 * numbers)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.heads}, head_dim={spec.head_dim}"


class ForgetGate(nn.Module):
    """The decay of each channel before its function, and the parameters of that function.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, and the rank of the projection.
    """

    def __init__(self, hidden_size: int, spec: ChannelDeltaSpec):
        super().__init__()
        self.heads = spec.heads
        if spec.forget_rank is None:
            self.f_proj = Linear(hidden_size, spec.size, bias=False)
        else:
            self.f_a_proj = Linear(hidden_size, spec.forget_rank, bias=False)
            self.f_b_proj = Linear(spec.forget_rank, spec.size, bias=False)
        self.low_rank = spec.forget_rank is not None
        self.A_log = nn.Parameter(torch.empty(spec.heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise decay rates from 1 to 16 and steps from 0.001 to 0.1, evenly in their logarithms;
        projections are modules of their own.
        """
        nn.init.uniform_(self.A_log, 1.0, 16.0, generator=generator)
        nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1), generator=generator)
        with torch.no_grad():
            self.A_log.log_()
            step = self.dt_bias.exp()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, heads, head_dim]."""
        f = self.f_b_proj(self.f_a_proj(x)) if self.low_rank else self.f_proj(x)
        return f.unflatten(-1, (self.heads, -1))
