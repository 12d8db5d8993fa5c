"""Self-attention with grouped key/value heads and rotary positions.

    q, k, v = rotate(split(x @ W_qkv^T + b));   out = attend(q, k, v) @ W_o^T + b
    or, with a gate g next to q:                out = (attend(q, k, v) * sigmoid(g)) @ W_o^T + b
    or, with a gate of its own, g = x @ W_g^T:  the same, by channel or by head; or g + a bias of each head
    or, with a norm of the output:              out = norm(attend(q, k, v)) @ W_o^T + b

Norms of queries and keys: layers/attention/qk_norm.py. With an indexer, queries attend to the blocks of keys
that it chooses (indexer.py). Query, key and value are one matrix product, with
weights concatenated by rows in this order, in whole heads. Values may have heads of another width, which is
then that of the output's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from liger_models.kernels import ChosenBlocks, rotary, split_rotary_qkv
from liger_models.layers.attention.backends import (
    AttentionBackend,
    attend,
    attend_by_groups,
)
from liger_models.layers.attention.cached import attend_cached
from liger_models.layers.attention.gates import gated, split_gate
from liger_models.layers.attention.indexer import BlockIndexer
from liger_models.layers.attention.qk_norm import QKNormScale, norm_bytes, split_norm_rotate
from liger_models.layers.attention.query_scale import scale_queries
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.parts.pooled_indexer import PooledIndexer
from liger_models.layers.projections.clipped_linear import ClippedLinear, ClippedProjections
from liger_models.layers.projections.linear import Linear, project_scaled
from liger_models.layers.projections.packed_linear import PackedLinear, in_order
from liger_models.layers.recompute.activation_memory import (
    TILED,
    ActivationMemory,
    output_is_ours,
)
from liger_models.layers.recompute.tiles import project_pieces
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec, BlockIndexerSpec


class Attention(nn.Module):
    """Causal self-attention over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, rotary settings, window, chunks, soft cap, sinks, biases.
        layer: the index of this layer in the model, and in a key-value cache.
        backend: see layers/attention/backends.py.
        input_size: the width of the input, if it is another one than H.
    """

    activation_memory: ActivationMemory = "lean"

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        layer: int = 0,
        backend: AttentionBackend = "auto",
        input_size: int | None = None,
    ):
        super().__init__()
        input_size = input_size or hidden_size
        self.spec, self.layer, self.backend = spec, layer, backend
        self.weight_dropout = nn.Dropout(spec.dropout) if spec.dropout else None
        self.axes = {
            "heads": spec.num_attention_heads,
            "key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_dim,
        }
        if spec.values_are_keys and spec.qk_norm is None:
            raise ValueError(
                "values_are_keys takes keys as they were before their norm, and this spec has no qk_norm; "
                "give it one"
            )
        if spec.value_dim != spec.head_dim and (spec.gated or spec.values_are_keys):
            raise ValueError(
                f"heads of values are {spec.value_dim} wide and those of keys {spec.head_dim}; gates next to "
                "the queries and values that are keys need equal widths"
            )
        if spec.rope is not None and spec.rope.halves and spec.qk_norm is None:
            raise ValueError("a RopeSpec with halves needs an AttentionSpec with qk_norm; give it one")
        parts = {"q_proj": spec.q_size * (2 if spec.gated else 1), "k_proj": spec.kv_size}
        if not spec.values_are_keys:
            parts["v_proj"] = spec.v_size
        projections, linear = (ClippedProjections, ClippedLinear) if spec.clipped else (PackedLinear, Linear)
        if not (spec.k_bias or spec.qkv_bias):
            raise ValueError("k_bias=False leaves out one of the biases of qkv_bias, which is not set")
        unbiased = {} if spec.k_bias else {"unbiased": ("k_proj",)}
        self.qkv_proj = projections(input_size, parts, spec.qkv_bias, **unbiased)
        if spec.gated and spec.gates:
            raise ValueError("an AttentionSpec has one gate: either `gated` or `gates`, not both")
        if spec.softplus_gates and not spec.gate_size:
            raise ValueError("softplus_gates belongs to a gate, but neither `gated` nor `gates` is set")
        if spec.gates:
            self.g_proj = Linear(input_size, spec.gate_size, bias=False)
        if spec.gate_bias and not spec.gates:
            raise ValueError("gate_bias belongs to `gates`, which are not set")
        self.gate_bias = nn.Parameter(torch.zeros(spec.num_attention_heads)) if spec.gate_bias else None
        self.o_norm = None if spec.out_norm is None else make_norm(spec.o_size, spec.out_norm)
        self.o_proj = linear(spec.o_size, hidden_size, bias=spec.o_bias)
        self.out_bias = nn.Parameter(torch.zeros(hidden_size)) if spec.out_bias else None
        self.sinks = nn.Parameter(torch.zeros(spec.num_attention_heads)) if spec.sinks else None
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            self.q_norm = QKNormScale(spec.num_attention_heads, spec.head_dim, spec.qk_norm)
            self.k_norm = QKNormScale(spec.num_key_value_heads, spec.head_dim, spec.qk_norm)
        self.indexer: BlockIndexer | PooledIndexer | None = None
        if spec.indexer is not None:
            of_blocks = isinstance(spec.indexer, BlockIndexerSpec)
            self.indexer = (BlockIndexer if of_blocks else PooledIndexer)(input_size, spec, layer)

    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        return_keys_values: bool = False,
        layer: int | None = None,
        added: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> [T, H], multiplied by `scale`. With `return_keys_values` also the keys and values, [T,
        num_key_value_heads, head_dim] and the width of values, or in generation [batch, longest, ...] from
        the cache.

        Where several layers share this module, `layer` is the index of the calling one. `added`, as wide as
        queries, keys and values, is added to them.
        """
        sequences = sequences.on(x.device)
        qkv, gate = self._without_gate(self._projected(x, added))  # no local name: it would keep the copy
        gate = self._own_gate(x) if self.spec.gates else gate
        if (limit := self.spec.qkv_limit) is not None:
            qkv = qkv.clamp(-limit, limit)
        q, k, v = self._query_key_value(qkv, sequences)
        q = scale_queries(q, self.spec.query_scale, sequences)
        asks, *index = (x,) if self.indexer is None else self.indexer.projected(x, sequences)
        if sequences.cache is not None:
            layer = self.layer if layer is None else layer
            out, k, v = self._attend_cached(asks, q, (k, v, *index), sequences, layer)
            out = gated(out.flatten(1), gate, self.spec.softplus_gates)
            out = project_scaled(self.o_proj, self._normed(out), scale)
        elif self.activation_memory in TILED:
            chosen = self._chosen(asks, index, sequences)
            groups = attend_by_groups(q, k, v, self._product, sequences, self.backend, self.sinks, chosen)
            pieces = [group.flatten(1) for group in groups]
            if gate is not None:
                gates = gate.tensor_split(len(pieces), dim=-1)
                softplus = self.spec.softplus_gates
                pieces = [gated(piece, own, softplus) for piece, own in zip(pieces, gates, strict=True)]
            if self.o_norm is None:
                out = project_pieces(pieces, self.o_proj)
            else:  # of all heads together
                out = self.o_proj(self._normed(pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)))
            out = out if scale == 1.0 else out * scale
        else:
            chosen = self._chosen(asks, index, sequences)
            out = attend(q, k, v, self._product, sequences, self.backend, self.sinks, chosen).flatten(1)
            out = self._normed(gated(out, gate, self.spec.softplus_gates))
            out = project_scaled(self.o_proj, out, scale)
        out = out if self.out_bias is None else out + self.out_bias.to(out.dtype) * scale
        return (out, k, v) if return_keys_values else out

    @property
    def _product(self) -> AttentionSpec:
        """The spec with the dropout of this call."""
        if self.weight_dropout is None:
            return self.spec
        dropout = self.weight_dropout.p if self.weight_dropout.training else 0.0
        return replace(self.spec, dropout=dropout)

    def _normed(self, out: Tensor) -> Tensor:
        """The input of the output projection."""
        return out if self.o_norm is None else cast(Tensor, self.o_norm(out))

    def _projected(self, x: Tensor, added: Tensor | None) -> Tensor:
        projected = in_order(self, "qkv_proj")(x)
        return projected if added is None else projected + added

    def _without_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """q | k | v [T, q_size + 2 kv_size], and the gate [T, q_size], if there is one."""
        spec = self.spec
        if not spec.gated:
            return qkv, None
        return split_gate(qkv, spec.num_attention_heads, spec.head_dim)

    def _own_gate(self, x: Tensor) -> Tensor:
        """The gate before its sigmoid, [T, o_size] or [T, heads]."""
        gate: Tensor = self.g_proj(x)
        if self.gate_bias is None:
            return gate
        by_head = gate.unflatten(-1, (len(self.gate_bias), -1)) + self.gate_bias.to(gate.dtype)[:, None]
        return by_head.flatten(1)

    def _query_key_value(self, qkv: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        tables = None if spec.rope is None else sequences.positions.rotary[spec.rope]
        if self.q_norm is not None and self.k_norm is not None:
            return split_norm_rotate(qkv, tables, spec, self.q_norm, self.k_norm)
        if tables is not None and tables[0].dim() == 3:
            raise ValueError("angles of single dimensions need norms of queries and keys")
        if spec.rope is None or tables is None or spec.value_dim != spec.head_dim:
            q, k, v = qkv.split([spec.q_size, spec.kv_size, spec.v_size], dim=-1)
            q, k = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k))
            v = v.unflatten(-1, (-1, spec.value_dim))
            if spec.rope is None or tables is None:
                return q, k, v
            # Copied, since a view would keep the queries and keys that are rotated into copies.
            return *rotary(q, k, *tables, interleaved=spec.rope.interleaved), v.contiguous()
        return split_rotary_qkv(
            qkv,
            *tables,
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
            interleaved=spec.rope.interleaved,
            # The backward pass of the projection does not read its output; with gates qkv is a copy.
            inplace=spec.gated or output_is_ours(self.qkv_proj),
        )

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw sinks from a normal distribution, and set biases of gates and of the output to zero;
        projections and norms are modules of their own.
        """
        for bias in (self.gate_bias, self.out_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        if self.sinks is not None:
            nn.init.normal_(self.sinks, 0.0, std, generator)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate keys and values, [batch, max_length, num_key_value_heads, their width] each, and what an
        indexer keeps.
        """
        spec, rows = self.spec, (batch, max_length)
        shapes = [(*rows, spec.num_key_value_heads, width) for width in (spec.head_dim, spec.value_dim)]
        own = tuple(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes)
        return own if self.indexer is None else (*own, *self.indexer.new_cache(*rows, device, dtype))

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, k, v, the output, and in float32 the log-sum-exp of each head;
        for query and key norms their inputs and statistics; for scaled queries the projection that k and v
        are views of; for a gate its sigmoid, or with softplus also its input in float32, and with `all` the
        product; for clamped projections the clamp's input; for a norm of the output 1/rms in float32, and
        with `all` its result. Bits of chosen blocks are not counted.
        """
        spec = self.spec
        kept = itemsize * (spec.q_size + spec.kv_size + spec.v_size + spec.o_size)
        kept += 4 * spec.num_attention_heads
        if spec.qk_norm is not None:
            kept += norm_bytes(spec, itemsize)
        if spec.gate_size:
            kept += itemsize * (spec.gate_size + (spec.o_size if level == "all" else 0))
            kept += 4 * spec.gate_size if spec.softplus_gates else 0
        if spec.qkv_limit is not None:
            kept += itemsize * (spec.q_size + spec.kv_size + spec.v_size)
        if spec.out_norm is not None:
            kept += 4 + (itemsize * spec.o_size if level == "all" else 0)
        return kept if spec.query_scale is None else kept + itemsize * spec.q_size

    def _chosen(self, asks: Tensor, index: Sequence[Tensor], sequences: Sequences) -> ChosenBlocks | None:
        """The blocks of keys that each token attends to; None for all."""
        return None if self.indexer is None else self.indexer(asks, *index, sequences)

    def _attend_cached(
        self, asks: Tensor, q: Tensor, new: tuple[Tensor, ...], sequences: Sequences, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`new`: keys, values, and what an indexer keeps; `asks`: what its queries are made of."""
        cache = sequences.cache
        assert cache is not None
        keys, values, *index = cache.append(layer, *new)
        mask = cache.mask(layer, self.spec.window, self.spec.chunk)
        if mask is None:
            k, v = new[:2]
            chosen = self._chosen(asks, new[2:3], sequences)
            return attend(q, k, v, self._product, sequences, self.backend, self.sinks, chosen), k, v
        if self.indexer is not None:
            mask = self.indexer.of_cached(asks, index, mask, sequences)
        return attend_cached(q, keys, values, self._product, mask, self.sinks), keys, values

    def extra_repr(self) -> str:
        spec = self.spec
        window = "" if spec.window is None else f", window={spec.window}"
        window += "" if spec.chunk is None else f", chunk={spec.chunk}"
        softcap = "" if spec.softcap is None else f", softcap={spec.softcap}"
        heads = f"heads={spec.num_attention_heads}/{spec.num_key_value_heads}"
        others = "".join(f", {name}" for name in ("sinks", "slopes") if getattr(spec, name))
        dims = f"{spec.head_dim}" if spec.v_head_dim is None else f"{spec.head_dim}/{spec.v_head_dim}"
        return f"{heads}, head_dim={dims}{window}{softcap}{others}"
