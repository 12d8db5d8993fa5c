"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads come
from one narrow latent of the token, and queries from another.

    q_latent, kv_latent, k_rope = split(x @ W_a^T + b)                  k_rope: one head shared by all
    q = norm(q_latent) @ W_qb^T,  or x @ W_q^T  without a latent        a head: [no position | rotated]
        or [norm(q_latent) | q_latent] @ W_qb^T
    k_nope, v = split(norm(kv_latent) @ W_kvb^T)
    out = attend([q_nope | rotate(q_rope)], [k_nope | rotate(k_rope)], v) @ W_o^T + b

With gates, g = x @ W_g^T [T, heads] or [T, heads * v_head_dim], or from more rows of W_qb, the output is
multiplied by sigmoid(g), and with sinks each head's softmax has one more logit, whose value is zero. With an
indexer, a query attends to the keys that it chooses (indexer.py). A layer may read norm(kv_latent) and
rotate(k_rope) of an earlier layer instead of computing its own (Brandon et al., 2024, arXiv:2405.12981).

A head's values may be narrower than its keys; nothing is padded. Generation caches the normalised latent and
the rotated k_rope, kv_lora_rank + qk_rope_head_dim elements a token, and recomputes keys and values from
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import ChosenBlocks, rotary
from liger_models.layers.attention.backends import AttentionBackend, attend
from liger_models.layers.attention.cached import attend_cached
from liger_models.layers.attention.gates import gated
from liger_models.layers.attention.indexer import Indexer
from liger_models.layers.attention.query_scale import LearnedQueryScale, scale_queries
from liger_models.layers.parts.gated_pools import GatedPoolIndexer
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedPoolsSpec, IndexerSpec, LatentAttentionSpec


class LatentAttention(nn.Module):
    """Causal latent attention over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, latents, rotary settings, biases.
        layer: the index of this layer in the model, and in a cache.
        backend: see layers/attention/backends.py.
    """

    def __init__(
        self, hidden_size: int, spec: LatentAttentionSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        if (spec.gated or spec.raw_q_latent) and spec.q_lora_rank is None:
            raise ValueError(f"gated and raw_q_latent are for queries from a latent, found {spec}")
        if spec.k_rope_norm and spec.latents_of is not None:
            raise ValueError("k_rope_norm is for layers that compute the rotated part of keys themselves")
        if spec.window is not None and (spec.indexer is not None or spec.keys_of is not None):
            raise ValueError("keys are chosen by an indexer or limited by a window, not both")
        if spec.gated and spec.gates:
            raise ValueError(f"gated is for attention without other gates, found {spec}")
        self.spec, self.layer, self.backend = spec, layer, backend
        heads, rank = spec.num_attention_heads, spec.q_lora_rank
        latents = {} if rank is None else {"q_a_proj": rank}
        if spec.latents_of is None:
            latents["kv_a_proj_with_mqa"] = spec.kv_lora_rank + spec.qk_rope_head_dim
        self.latent_proj = PackedLinear(hidden_size, latents, bias=spec.bias) if latents else None
        if rank is None:
            self.q_proj = Linear(hidden_size, heads * spec.qk_head_dim, bias=False)
        else:
            self.q_a_layernorm = make_norm(rank, spec.norm)
            of_head = spec.qk_head_dim + (spec.v_head_dim if spec.gated else 0)
            self.q_b_proj = Linear(2 * rank if spec.raw_q_latent else rank, heads * of_head, bias=False)
        if spec.latents_of is None:
            self.kv_a_layernorm = make_norm(spec.kv_lora_rank, spec.norm)
        if spec.k_rope_norm:
            self.k_rope_only_layernorm = make_norm(spec.qk_rope_head_dim, spec.norm)
        self.kv_b_proj = Linear(
            spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim), bias=False
        )
        self.shares_keys = False  # whether later layers attend to the keys chosen here
        self.shares_latents = False  # whether later layers read the latents made here
        if spec.learned_query_scale:
            self.softmax_scaling = LearnedQueryScale(heads)
        if spec.indexer is not None:
            kind = GatedPoolIndexer if isinstance(spec.indexer, GatedPoolsSpec) else Indexer
            self.indexer: Any = kind(hidden_size, spec, layer)
        if spec.gates:
            self.g_proj = Linear(hidden_size, spec.gate_size, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads)) if spec.sinks else None
        self.o_proj = Linear(heads * spec.v_head_dim, hidden_size, bias=spec.bias)

    def reset_parameters(self, *_: object) -> None:
        """Initialise sinks with zeros; projections and norms are modules of their own."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, sequences: Sequences, *read: Tensor) -> Tensor | tuple[Tensor, ...]:
        """x [T, H] -> [T, H]. A layer whose latents others read also returns these, [T, kv_lora_rank], and
        the rotated part of keys, [T, qk_rope_head_dim], or in generation both of all cached tokens, [batch,
        longest, ...]; the others receive them as `read`.
        """
        sequences = sequences.on(x.device)
        cache, spec = sequences.cache, self.spec.attention
        q, gate, q_latent, made = self._queries_and_latents(x, sequences)
        gate = self.g_proj(x) if self.spec.gates else gate
        index = () if self.spec.indexer is None else (self.indexer.keys(x, sequences),)
        latents, mask = made or read, None
        if cache is not None:
            kept = cache.append(self.layer, *made, *index) if made or index else ()
            source = self.spec.latents_of
            mask = cache.mask(self.layer if source is None else source, spec.window)
        if mask is not None:
            latents = kept[: len(made)] or read
            mask = self._chosen_of_cached(x, q_latent, kept[len(made) :], mask, sequences)
            out = attend_cached(q, *self._keys_and_values(*latents), spec, mask, self.sinks)
        else:
            chosen = self._chosen(x, q_latent, index, sequences)
            k, v = self._keys_and_values(*latents)
            out = attend(q, k, v, spec, sequences, self.backend, self.sinks, chosen)
            losses = sequences.notes.indexer_losses
            if isinstance(self.spec.indexer, IndexerSpec) and losses.asked_for:
                layer = q, k, self.sinks
                losses.note(self.indexer.loss(x, q_latent, layer, spec.scale, chosen, sequences))
        out = self.o_proj(gated(out.flatten(1), gate))
        return (out, *latents) if self.shares_latents else out

    def _chosen(
        self, x: Tensor, q_latent: Tensor | None, keys: tuple[Tensor, ...], sequences: Sequences
    ) -> Tensor | ChosenBlocks | None:
        """The keys that each token attends to, as `attend` takes them; None for all."""
        if self.spec.keys_of is not None:
            return sequences.notes.chosen_keys[self.spec.keys_of]
        if self.spec.indexer is None:
            return None
        chosen = self.indexer(x, q_latent, *keys, sequences)
        if self.shares_keys:
            sequences.notes.chosen_keys[self.layer] = chosen
        return chosen

    def _chosen_of_cached(
        self, x: Tensor, q_latent: Tensor | None, keys: tuple[Tensor, ...], mask: Tensor, sequences: Sequences
    ) -> Tensor:
        """The cached keys that each new token attends to: `mask`, or part of it."""
        if self.spec.keys_of is not None:
            chosen = sequences.notes.chosen_keys[self.spec.keys_of]
            assert isinstance(chosen, Tensor)
            return chosen.to(mask.device)
        if self.spec.indexer is None:
            return mask
        chosen = self.indexer.of_cached(x, q_latent, keys[0], mask, sequences)
        if self.shares_keys:
            sequences.notes.chosen_keys[self.layer] = chosen
        return chosen

    def _queries_and_latents(
        self, x: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
        """q [T, heads, qk_head_dim], rotated and scaled; the gate that comes with it, [T, heads *
        v_head_dim]; the normalised latent of queries [T, q_lora_rank],
        if they have one; and, unless another layer makes them, the normalised latent of keys and values [T,
        kv_lora_rank], and the rotated k_rope [T, qk_rope_head_dim].
        """
        spec = self.spec
        parts = [] if self.latent_proj is None else list(self.latent_proj(x).split(self._widths(), dim=-1))
        q_latent, gate = None, None
        if spec.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            raw = parts.pop(0)
            q_latent = self.q_a_layernorm(raw)
            q = self.q_b_proj(_side_by_side(q_latent, raw) if spec.raw_q_latent else q_latent)
        q = q.unflatten(-1, (spec.num_attention_heads, -1))
        if spec.gated:
            q, gate = q.split([spec.qk_head_dim, spec.v_head_dim], dim=-1)
            gate = gate.flatten(1)
        k_rope = parts[1] if parts else x[:, :0]
        k_rope = self.k_rope_only_layernorm(k_rope) if spec.k_rope_norm else k_rope
        if spec.rope is not None:
            cos, sin = sequences.positions.rotary[spec.rope]
            q_nope, q_rope = q.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1)
            k_head = k_rope[:, None] if parts else q_rope[:, :0]
            q_rope, k_head = rotary(q_rope, k_head, cos, sin, spec.rope.interleaved)
            q = torch.cat([q_nope, q_rope], dim=-1)
            k_rope = k_head[:, 0] if parts else k_rope
        q = scale_queries(q, spec.query_scale, sequences)
        if spec.learned_query_scale:
            q = self.softmax_scaling(q, sequences)
        if not parts:
            return q, gate, q_latent, ()
        latent = self.kv_a_layernorm(parts[0])
        latent = latent if spec.latent_scale == 1.0 else latent * spec.latent_scale
        return q, gate, q_latent, (latent, k_rope)

    def _keys_and_values(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """latent [..., kv_lora_rank], k_rope [..., qk_rope_head_dim] -> k, v [..., heads, their sizes]."""
        spec = self.spec
        k_nope, v = (
            self.kv_b_proj(latent)
            .unflatten(-1, (spec.num_attention_heads, -1))
            .split([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        )
        shared = k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
        return torch.cat([k_nope, shared], dim=-1), v

    def _widths(self) -> list[int]:
        """Widths of the parts of the latent projection."""
        spec = self.spec
        of_q = [] if spec.q_lora_rank is None else [spec.q_lora_rank]
        return of_q if spec.latents_of is not None else [*of_q, spec.kv_lora_rank, spec.qk_rope_head_dim]

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate latents [batch, max_length, kv_lora_rank] and k_rope [batch, max_length, its size], unless
        another layer makes them, and keys of the indexer [batch, max_length, their size].
        """
        widths = []
        if self.spec.latents_of is None:
            widths = [self.spec.kv_lora_rank, self.spec.qk_rope_head_dim]
        if self.spec.indexer is not None:
            widths.append(self.spec.indexer.key_size)
        return tuple(torch.zeros(batch, max_length, width, device=device, dtype=dtype) for width in widths)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q, k, the projection with k_nope and v, the output, and in float32
        the log-sum-exp of each head; the latents, their norms' statistics, and with `all` the norms' outputs;
        for learned scales the queries before them, and in float32 the factors. An eighth of a byte per token
        of its document, for chosen keys, is not counted, nor are latents that another layer keeps.
        """
        spec = self.spec
        heads, own = spec.num_attention_heads, spec.latents_of is None
        a_head = 2 * spec.qk_head_dim + spec.qk_nope_head_dim + 2 * spec.v_head_dim
        of_q = spec.q_lora_rank or 0
        normed = of_q + (spec.kv_lora_rank if own else 0)
        scaled = 0 if spec.latent_scale == 1.0 or not own else spec.kv_lora_rank
        latents = normed + (spec.qk_rope_head_dim if own else 0) + (normed if level == "all" else scaled)
        in_float32 = heads + (of_q > 0) + own + spec.k_rope_norm
        if spec.learned_query_scale:
            a_head, in_float32 = a_head + spec.qk_head_dim, in_float32 + heads
        gated_output = heads * spec.v_head_dim if level == "all" and spec.gate_size else 0
        gates = spec.gate_size + gated_output + (2 * of_q if level == "all" and spec.raw_q_latent else 0)
        return itemsize * (heads * a_head + latents + gates) + 4 * in_float32

    def extra_repr(self) -> str:
        spec = self.spec
        dims = f"{spec.qk_nope_head_dim}+{spec.qk_rope_head_dim}/{spec.v_head_dim}"
        return f"heads={spec.num_attention_heads}, head_dims={dims}"


def _side_by_side(normed: Tensor, raw: Tensor) -> Tensor:
    """The latent of queries after and before its norm, [T, 2 * q_lora_rank], made again when needed."""
    return carry_recipe(_joined(normed, raw), _joined, normed, raw, late=True, deep=True)


def _joined(normed: Tensor, raw: Tensor) -> Tensor:
    return torch.cat([normed, raw], dim=-1)
