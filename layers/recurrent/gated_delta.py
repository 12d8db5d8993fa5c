"""Linear attention by the gated delta rule: Qwen3-Next, Qwen3.5, Qwen4, OLMo hybrid.

    q, k, v, z, b, a = split(x @ W_in^T);   q, k, v = silu(conv(q, k, v))
    o = gated_delta_rule(q, k, v, a, b);    out = (norm(o) * silu(z)) @ W_o^T     or sigmoid(z)

The rule and its gates are in kernels/recurrent/gated_delta_rule.py. State and convolution restart at every
document.

Between the projections and the norm, `lean` keeps q, k, v before the convolution, a, b, z and o. The
convolution runs again in the backward pass. The states of chunks are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import gated_delta_rule, gated_delta_rule_step
from liger_models.kernels._dispatch import ceil_div
from liger_models.kernels.recurrent._chunk_table import CHUNK, SEGMENT, ChunkTables
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.gated_norm import GatedNormalisation
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import WHOLE, Share, ShortConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedDeltaSpec


class GatedDelta(RecurrentMixer):
    """Gated delta rule over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, convolution, gates, and which projections checkpoints hold together.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    transfers = "matrices"

    def __init__(
        self, hidden_size: int, spec: GatedDeltaSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__(layer)
        self.spec = spec
        keys, values, heads = spec.key_size, spec.value_size, spec.value_heads
        if spec.projections == "qkvz":
            self.in_proj_qkvz = Linear(hidden_size, spec.conv_size + values, bias=False)
            self.in_proj_ba = Linear(hidden_size, 2 * heads, bias=False)
        elif spec.projections == "qkv":
            parts = {"in_proj_qkv": spec.conv_size, "in_proj_z": values}
            self.in_proj_qkvz = PackedLinear(hidden_size, parts)
            self.in_proj_ba = PackedLinear(hidden_size, {"in_proj_b": heads, "in_proj_a": heads})
        else:
            parts = {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}
            self.in_proj_qkvz = PackedLinear(hidden_size, parts)
            self.in_proj_ba = PackedLinear(hidden_size, {"b_proj": heads, "a_proj": heads})
        key_heads, value_heads = (spec.key_heads, spec.key_dim), (spec.value_heads, spec.value_dim)
        names = ("q_conv1d", "k_conv1d", "v_conv1d") if spec.projections == "apart" else ()
        self.conv1d = ShortConvolution((key_heads, key_heads, value_heads), spec.conv, names=names)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        gate, cast = spec.gate_activation, spec.norm_cast
        self.norm = GatedNormalisation(spec.value_dim, spec.norm_eps, activation=gate, cast=cast)
        self.out_proj = Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise decay rates from 0.01 to 16 and biases of one; projections are modules of their own."""
        nn.init.uniform_(self.A_log, 0.01, 16.0, generator=generator)
        with torch.no_grad():
            self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        qkv, z, b, a = self._project(x, sequences)
        o = self.mix(qkv, (a, b), sequences)
        return self.out_proj(self.norm(o.flatten(1), z))

    def _project(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q | k | v [T, conv_size], z [T, value_size], b and a [T, value_heads]."""
        spec, qkvz, ba = self.spec, self.in_proj_qkvz(x), self.in_proj_ba(x)
        if spec.projections != "qkvz":
            qkv, z = self.split(qkvz, (spec.conv_size, spec.value_size), sequences)
            b, a = ba.split(spec.value_heads, dim=-1)
            return qkv, z, b, a
        # The parts of each key head are adjacent.
        values = spec.value_size // spec.key_heads
        *qkv, z = qkvz.unflatten(-1, (spec.key_heads, -1)).split([spec.key_dim] * 2 + [values] * 2, dim=-1)
        b, a = (gate.flatten(1) for gate in ba.unflatten(-1, (spec.key_heads, 2, -1)).unbind(2))
        return torch.cat([part.flatten(1) for part in qkv], dim=-1), z.flatten(1), b, a

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        (q, k, v), (a, b) = parts, gates
        by_head, scale = self.own_share(share, self.A_log, self.dt_bias), self.spec.beta_scale
        options: dict[str, Any] = {"cu_seqlens": documents, "state": state, "tables": tables}
        return gated_delta_rule(q, k, v, a, b, *by_head, beta_scale=scale, **options)

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        (q, k, v), (a, b), scale = parts, gates, self.spec.beta_scale
        return gated_delta_rule_step(q, k, v, a, b, self.A_log, self.dt_bias, state, beta_scale=scale)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.spec.value_heads, self.spec.key_dim, self.spec.value_dim

    @property
    def early_width(self) -> int:
        return 0 if self.spec.projections == "qkvz" else self.spec.conv_size

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, k and v before the convolution, z, a, b and o; with `all` also q,
        k and v after it and the norm's output; and in float32 the states between segments and how each
        segment changes them.
        """
        spec = self.spec
        kept = spec.conv_size + 2 * spec.value_size + 2 * spec.value_heads
        states = 4 * spec.value_heads * spec.key_dim * (spec.key_dim + spec.value_dim) // SEGMENT
        return itemsize * (kept + (spec.conv_size + spec.value_size if level == "all" else 0)) + states

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the rule on a GPU, in addition to what `lean`
        keeps, less o, which the norm has freed, and z if it is a copy: gradients of o and z; q, k and v after
        the convolution; the gradient of v; the tokens' writes, replaced by the gradients of q and k if they
        fit; the gradients of k through the states, a part for each program that shares a head; per chunk two
        squares of scores, and states; and in float32 numbers, and gradients of states between segments.
        """
        spec = self.spec
        keys = 2 * spec.key_heads * spec.key_dim
        parts = 1 if spec.key_dim == spec.value_dim == 128 else ceil_div(spec.value_dim, 64)
        chunk = 2 * CHUNK + spec.key_dim * spec.value_dim / CHUNK + parts * spec.key_dim
        between = spec.value_size * spec.key_dim / SEGMENT
        numbers = 4 * (7 * spec.value_heads + 2 * spec.key_heads + spec.value_size / CHUNK + between)
        freed = (2 if spec.projections == "qkvz" else 1) * spec.value_size
        grads = spec.conv_size + 4 * spec.value_size - freed + (0 if keys <= spec.value_size else keys)
        return int(itemsize * (grads + spec.value_heads * chunk) + numbers)

    def divided_backward_bytes(self, itemsize: int, ranks: int) -> int:
        """The same for a sequence divided over ranks, less the product that contains z: only
        copies of its other parts are needed.
        """
        spec = self.spec
        product = 0 if spec.projections == "qkvz" else spec.conv_size + spec.value_size
        return self.backward_bytes(itemsize) - itemsize * product

    def extra_repr(self) -> str:
        spec = self.spec
        heads = f"heads={spec.key_heads}/{spec.value_heads}"
        return f"{heads}, head_dims={spec.key_dim}/{spec.value_dim}"
