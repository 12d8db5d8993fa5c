"""Linear attention by the gated delta rule: Qwen3-Next, Qwen3.5, OLMo hybrid.

    q, k, v, z, b, a = split(x @ W_in^T);   q, k, v = silu(conv(q, k, v))
    o = gated_delta_rule(q, k, v, a, b);    out = (norm(o) * silu(z)) @ W_o^T

The rule and its gates are in kernels/recurrent/gated_delta_rule.py. State and convolution restart at every
document.

Between the projections and the norm, `lean` keeps q, k, v before the convolution, a, b, z and o. The
convolution runs again in the backward pass. The states of chunks are never kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import document_bounds, gated_delta_rule, gated_delta_rule_step
from liger_models.kernels.recurrent._chunk_table import CHUNK
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.branches import States, over_branches
from liger_models.layers.recurrent.gated_norm import GatedNormalisation
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedDeltaSpec


class GatedDelta(nn.Module):
    """Gated delta rule over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, convolution, gates, and which projections checkpoints hold together.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    def __init__(
        self, hidden_size: int, spec: GatedDeltaSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec, self.layer = spec, layer
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
        self.norm = GatedNormalisation(spec.value_dim, spec.norm_eps)
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
        sequences = sequences.on(x.device)
        qkv, z, b, a = self._project(x)
        if sequences.cache is not None:
            o = self._continue(qkv, b, a, sequences)
        elif sequences.documents.tree is not None:
            o = over_branches(sequences.documents.tree, [qkv, b, a], self._branches)
        elif sequences.slice is not None:
            o = self._exchange(qkv, b, a, sequences.slice, sequences.documents)
        else:
            o, _ = self._mix(qkv, b, a, sequences.documents.boundaries(), sequences.documents.bounds())
        return self.out_proj(self.norm(o.flatten(1), z))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q | k | v [T, conv_size], z [T, value_size], b and a [T, value_heads]."""
        spec, qkvz, ba = self.spec, self.in_proj_qkvz(x), self.in_proj_ba(x)
        if spec.projections != "qkvz":
            qkv, z = qkvz.split([spec.conv_size, spec.value_size], dim=-1)
            b, a = ba.split(spec.value_heads, dim=-1)
            return qkv, z, b, a
        # The parts of each key head are adjacent.
        values = spec.value_size // spec.key_heads
        *qkv, z = qkvz.unflatten(-1, (spec.key_heads, -1)).split([spec.key_dim] * 2 + [values] * 2, dim=-1)
        b, a = (gate.flatten(1) for gate in ba.unflatten(-1, (spec.key_heads, 2, -1)).unbind(2))
        return torch.cat([part.flatten(1) for part in qkv], dim=-1), z.flatten(1), b, a

    def _mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None = None,
        states: States | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return o [T, value_heads, value_dim] of documents, and the rule's states after them. `states` are
        the initial states, of the convolution and of the rule.
        """
        conv_state, state = (None, None) if states is None else states
        q, k, v = self.conv1d(qkv, documents, bounds, conv_state)
        gates, scale = (a, b, self.A_log, self.dt_bias), self.spec.beta_scale
        return gated_delta_rule(q, k, v, *gates, beta_scale=scale, cu_seqlens=documents, state=state)

    def _exchange(self, qkv: Tensor, b: Tensor, a: Tensor, slice: Slice, documents: Documents) -> Tensor:
        """Return o [t, value_heads, value_dim] of this rank's tokens. Each rank computes its share of the
        heads for all tokens: channels move with their heads, so that convolution and state see whole
        documents.
        """
        spec, ranks = self.spec, slice.ranks
        parts = qkv.split([spec.key_size, spec.key_size, spec.value_size], dim=-1)
        dims = spec.key_dim, spec.key_dim, spec.value_dim
        heads = [part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True)]
        rows = slice.dealt(*heads, b[..., None], a[..., None])
        own = spec.value_heads // ranks
        qkv, b, a = rows.split([spec.conv_size // ranks, own, own], dim=-1)
        q, k, v = self.conv1d(qkv, None, documents.bounds(), share=(slice.rank, ranks))
        A_log, dt_bias = (p.chunk(ranks)[slice.rank] for p in (self.A_log, self.dt_bias))
        bounds, scale = documents.boundaries(), spec.beta_scale
        o, _ = gated_delta_rule(q, k, v, a, b, A_log, dt_bias, beta_scale=scale, cu_seqlens=bounds)
        return slice.to_tokens(o)

    def _branches(self, operands: list[Tensor], documents: Tensor, states: States | None) -> Any:
        qkv, b, a = operands
        return self._with_states(qkv, b, a, documents, document_bounds(documents, len(qkv)), states)

    def _with_states(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None,
        states: States | None,
    ) -> tuple[Tensor, States]:
        """As `_mix`, with the states of both convolution and rule after the documents."""
        o, state = self._mix(qkv, b, a, documents, bounds, states)
        return o, (self.conv1d.next_state(qkv, documents, None if states is None else states[0]), state)

    def _continue(self, qkv: Tensor, b: Tensor, a: Tensor, sequences: Sequences) -> Tensor:
        """Return o [T, value_heads, value_dim] of new tokens, whose documents are the rows of a cache."""
        cache = sequences.cache
        assert cache is not None
        before = cache.states(self.layer)
        if (real := cache.real_tokens()) is not None:
            tokens, rows = real
            bounds = document_bounds(rows, len(tokens))
            o, behind = self._with_states(qkv[tokens], b[tokens], a[tokens], rows, bounds, before)
            o = o.new_zeros(len(qkv), *o.shape[1:]).index_copy(0, tokens, o)
        elif before is not None and cache.newest == 1 and len(qkv) == len(before[0]):
            (q, k, v), conv_state = self.conv1d.step(qkv, before[0])
            gates, scale = (a, b, self.A_log, self.dt_bias), self.spec.beta_scale
            o, state = gated_delta_rule_step(q, k, v, *gates, before[1], beta_scale=scale)
            behind = conv_state, state
        else:
            documents = sequences.documents
            o, behind = self._with_states(qkv, b, a, documents.boundaries(), documents.bounds(), before)
        cache.keep_states(self.layer, *behind)
        return o

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate the convolution's last inputs [batch, width - 1, conv_size], and states [batch,
        value_heads, key_dim, value_dim] in float32.
        """
        spec = self.spec
        inputs = torch.zeros(batch, spec.conv - 1, spec.conv_size, device=device, dtype=dtype)
        shape = batch, spec.value_heads, spec.key_dim, spec.value_dim
        wide = torch.promote_types(dtype, torch.float32)
        return inputs, torch.zeros(shape, device=device, dtype=wide)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, k and v before the convolution, z, a, b and o; with `all` also q,
        k and v after it and the norm's output.
        """
        spec = self.spec
        kept = spec.conv_size + 2 * spec.value_size + 2 * spec.value_heads
        return itemsize * (kept + (spec.conv_size + spec.value_size if level == "all" else 0))

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the rule on a GPU, in addition to what `lean`
        keeps: gradients of o and z; q, k and v after the convolution and their gradients; the tokens' writes
        and their gradients; per chunk the solved triangle, and states with their gradients; and gates in
        float32.
        """
        spec = self.spec
        chunk = spec.value_heads * (CHUNK + 2 * spec.key_dim * spec.value_dim / CHUNK)
        numbers = 4 * (4 * spec.value_heads + 2 * spec.key_heads)
        return int(itemsize * (4 * spec.value_size + 2 * spec.conv_size + chunk)) + numbers

    def extra_repr(self) -> str:
        spec = self.spec
        heads = f"heads={spec.key_heads}/{spec.value_heads}"
        return f"{heads}, head_dims={spec.key_dim}/{spec.value_dim}"
