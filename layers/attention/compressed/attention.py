"""Attention to a window of keys and to compressed ones, which are the values, too (DeepSeek-V4, 2026).

    q_latent, kv = split(x @ W_a^T);    q = rotate(rms(norm(q_latent) @ W_qb^T)),   k = v = rotate(norm(kv))
    out = rotate_back(attend(q, [k of the window | compressed keys], sinks))
    y = concat over groups g of heads of (out_g @ W_oa,g^T) @ W_ob^T

The last dimensions of a head are rotated. Values are rotated with the keys, so the output is rotated back at
the query's position: a value then counts as rotated by its distance. Compressed keys: compressor.py; the
product: kernels/attention/compressed_keys.py. Generation caches the keys, what the compressors read of every
token, and compressed keys; each step makes only those that its tokens complete.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import rms_norm
from liger_models.kernels.attention.compressed_keys import (
    CompressedKeys,
    compressed_attention,
    compressed_keys,
)
from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.cached import attend_cached
from liger_models.layers.attention.compressed.compressor import (
    CompressedIndexer,
    Compressor,
    Tables,
    rotate_last,
)
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import CompressedAttentionSpec


class CompressedAttention(nn.Module):
    """Causal attention over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, rotary settings, window, compressor.
        layer: the index of this layer in the model, and in a cache.
        backend: "auto", "eager" or "masked", which are the same.

    Raises:
        ValueError: another backend, heads that do not divide into the groups, or rotary settings that depend
            on the length of a batch or do not pair neighbouring dimensions.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: CompressedAttentionSpec,
        layer: int = 0,
        backend: AttentionBackend = "auto",
    ):
        super().__init__()
        if backend not in ("auto", "eager", "masked"):
            raise ValueError(f"attention={backend!r} does not support compressed keys; use 'auto'")
        rope = spec.rope
        if spec.num_attention_heads % spec.o_groups or rope.depends_on_length or not rope.interleaved:
            raise ValueError(
                f"found {spec.num_attention_heads} heads in {spec.o_groups} groups and {rope}; expected "
                "groups of equal size, and interleaved rotation that does not depend on the length of a batch"
            )
        self.spec, self.layer, self.backend = spec, layer, backend
        self.latent_proj = PackedLinear(hidden_size, {"q_a_proj": spec.q_lora_rank, "kv_proj": spec.head_dim})
        self.q_a_norm = make_norm(spec.q_lora_rank, spec.norm)
        self.q_b_proj = Linear(spec.q_lora_rank, spec.q_size, bias=False)
        self.kv_norm = make_norm(spec.head_dim, spec.norm)
        self.sinks = nn.Parameter(torch.zeros(spec.num_attention_heads))
        self.compressor = self.indexer = None
        if spec.compressor is not None:
            self.compressor = Compressor(hidden_size, spec.head_dim, spec.compressor, spec.norm)
            if spec.indexer is not None:
                self.indexer = CompressedIndexer(hidden_size, spec, spec.compressor)
        self.o_a_proj = GroupedLinear(spec.q_size, spec.o_groups, spec.o_lora_rank)
        self.o_b_proj = Linear(spec.o_groups * spec.o_lora_rank, hidden_size, bias=False)

    def reset_parameters(self, *_: object) -> None:
        """Initialise sinks with zeros; projections and norms are modules of their own."""
        nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H].

        Raises:
            ValueError: within `batch_invariant`.
        """
        if is_batch_invariant():
            raise ValueError("attention to compressed keys depends on the batch: leave batch_invariant")
        sequences, spec = sequences.on(x.device), self.spec
        tables = sequences.positions.rotary[spec.rope]
        latent, kv = self.latent_proj(x).split([spec.q_lora_rank, spec.head_dim], dim=-1)
        q_latent = self.q_a_norm(latent)
        q = self.q_b_proj(q_latent).unflatten(-1, (spec.num_attention_heads, -1))
        make = functools.partial(_normed_and_rotated, spec.norm.eps)
        q = carry_recipe(make(q, *tables), make, q, *tables, late=True)
        keys = rotate_last(self.kv_norm(kv)[:, None], tables)[:, 0]
        projected = () if self.compressor is None else (self.compressor.kv_gate_proj(x),)
        out = None
        if sequences.cache is not None:
            out = self._attend_cached(x, q_latent, q, keys, projected, sequences, tables)
        if out is None:
            out = self._attend(x, q_latent, q, keys, projected, sequences, tables)
        return self.o_b_proj(self.o_a_proj(rotate_last(out, tables, back=True)))

    def _attend(
        self,
        x: Tensor,
        q_latent: Tensor,
        q: Tensor,
        keys: Tensor,
        projected: tuple[Tensor, ...],
        sequences: Sequences,
        tables: Tables,
    ) -> Tensor:
        """Attention within the documents, [T, heads, head_dim]."""
        spec, places, chosen, compressed = self.spec, _places(sequences, self.spec), None, None
        if self.compressor is not None:
            of_keys = tables[0][places.first], tables[1][places.first]
            compressed = self.compressor(*projected, places.first, places.number, of_keys)
            if self.indexer is not None:
                chosen = self.indexer(x, q_latent, places, tables, of_keys)
                if (losses := sequences.notes.indexer_losses).asked_for:
                    layer = q, keys, compressed, self.sinks
                    loss = self.indexer.loss(
                        *(x, q_latent, layer, places, tables, of_keys),
                        scale=spec.scale,
                        window=spec.window,
                        chosen=chosen,
                    )
                    losses.note(loss)
        return compressed_attention(
            *(q, keys, compressed, self.sinks, places),
            scale=spec.scale,
            window=spec.window,
            chosen=chosen,
        )

    def _attend_cached(
        self,
        x: Tensor,
        q_latent: Tensor,
        q: Tensor,
        keys: Tensor,
        projected: tuple[Tensor, ...],
        sequences: Sequences,
        tables: Tables,
    ) -> Tensor | None:
        """Attention to cached tokens; None if the cache holds only the new ones."""
        cache: Any = sequences.cache
        if self.indexer is not None:
            with torch.no_grad():
                projected = (*projected, self.indexer.compressor.kv_gate_proj(x))
        held, *read = cache.append_compressed(self.layer, keys, *projected)
        mask = cache.mask(self.layer, self.spec.window)
        if mask is None:
            return None
        if self.compressor is not None:
            place, start = cache.places()
            # Positions rise by one from token to token, so the first new token's tells those of the keys.
            shift = sequences.positions.ids.unflatten(0, place.shape)[:, 0] - place[:, 0]
            slots = place, start, shift
            number = torch.arange(read[0].shape[1] // self.compressor.rate, device=x.device)
            seen = number < ((place + 1) // self.compressor.rate)[..., None]
            if self.indexer is not None:
                with torch.no_grad():
                    index_keys = self._keep(self.indexer.compressor, "indexer", read[1], cache, slots)
                seen = self.indexer.of_cached(x, q_latent, index_keys, seen, tables)
            compressed = self._keep(self.compressor, "compressor", read[0], cache, slots)
            held, mask = torch.cat([held, compressed.to(held.dtype)], 1), torch.cat([mask, seen], -1)
        held = held[:, :, None].to(q.dtype)
        return attend_cached(q, held, held, self.spec.attention, mask, self.sinks)

    def _keep(
        self,
        compressor: Compressor,
        name: str,
        rows: Tensor,
        cache: Any,
        slots: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Add the keys that new tokens may have completed to those in the cache, and return all, [batch, W,
        dim]. Keys of slots after a sequence's last token are not seen, and are made again once whole.

        Args:
            compressor: what makes the keys.
            name: of the keys in the cache.
            rows: [batch, extent, 2 width], what the compressor reads.
            cache: of the call.
            slots: of the new tokens [batch, new] and of each sequence's first token [batch], and how far
                positions are ahead of the former [batch].
        """
        (place, start, shift), rate, (batch, extent, _) = slots, compressor.rate, rows.shape
        of_layer = cache.compressed_keys(self.layer)
        kept, count = of_layer.get(name), extent // rate
        if kept is None:
            kept = rows.new_zeros(batch, 0, compressor.dim)
            number = torch.arange(count, device=rows.device).expand(batch, -1)
        else:
            number = place[:, :1] // rate + torch.arange(-(-place.shape[1] // rate), device=rows.device)
        if count:
            own = (start[:, None] + number * rate).clamp(max=extent - rate)
            first = (torch.arange(batch, device=rows.device)[:, None] * extent + own).flatten()
            of_keys = rotary_tables(self.spec.rope, (shift[:, None] + number * rate).flatten())
            values = compressor(rows.flatten(0, 1), first, number.flatten(), of_keys)
            fixed = kept.is_inference() and not torch.is_inference_mode_enabled()
            if fixed or kept.shape[1] < count + 2:  # a last one or two may not be whole
                more = max(count + 64 - kept.shape[1], 0)
                kept = torch.cat([kept, kept.new_zeros(batch, more, compressor.dim)], 1)
            index = number[..., None].expand(-1, -1, compressor.dim)
            # In place, since a recorded step reads and writes the same memory each time.
            kept = of_layer[name] = kept.scatter_(1, index, values.unflatten(0, number.shape).to(kept.dtype))
        return kept[:, :count]

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate keys [batch, max_length, head_dim], and as many rows of what the compressors of keys and
        of the indexer read.
        """
        widths = [self.spec.head_dim]
        if self.compressor is not None:
            widths.append(2 * self.compressor.width)
        if self.indexer is not None:
            widths.append(2 * self.indexer.compressor.width)
        return tuple(torch.zeros(batch, max_length, width, device=device, dtype=dtype) for width in widths)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token: the latents, queries before their norm and at the level `all` after it, the
        output before and after its rotation and the projection of its groups, the log-sum-exp of each head
        and the norms' statistics in float32; of compressors also the tokens' gathered values and, in float32,
        weights; and the numbers of chosen keys, if `top_k` are fewer than there are.
        """
        spec, itself = self.spec, self.compressor
        latents = spec.q_lora_rank * (2 if level == "all" else 1) + 2 * spec.head_dim
        queries = spec.q_size * (2 if level == "all" else 1)
        kept = itemsize * (latents + queries + 2 * spec.q_size + spec.o_groups * spec.o_lora_rank)
        kept += 4 * (2 * spec.num_attention_heads + 2)
        if itself is not None:
            kept += (itemsize + 4) * itself.width + 3 * itemsize * spec.head_dim // itself.rate
        if spec.indexer is not None:
            kept += 4 * spec.indexer.top_k
        return kept

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}, head_dim={spec.head_dim}, window={spec.window}"


class GroupedLinear(nn.Module):
    """Projection of groups of columns, each by a matrix of its own. Not a linear layer for other tools, which
    would take it for one of a group's width.

    Args:
        in_features: the width of the input, of all groups.
        groups: the number of groups G.
        out_features: the width of a group's output.
    """

    def __init__(self, in_features: int, groups: int, out_features: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * out_features, in_features // groups))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise from a normal distribution."""
        nn.init.normal_(self.weight, 0.0, std, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, ..., n] with in_features elements per token -> [T, G out_features]."""
        groups = x.flatten(1).unflatten(-1, (self.groups, -1)).transpose(0, 1)  # [G, T, in]
        weights = self.weight.unflatten(0, (self.groups, -1)).mT
        return torch.bmm(groups, weights).transpose(0, 1).flatten(1)

    def extra_repr(self) -> str:
        return f"groups={self.groups}"


def _normed_and_rotated(eps: float, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_last(rms_norm(q, None, eps), (cos, sin))


def _places(sequences: Sequences, spec: CompressedAttentionSpec) -> CompressedKeys:
    """The places of compressed keys, found once for all layers of one rate."""
    documents, rate = sequences.documents, 0 if spec.compressor is None else spec.compressor.rate
    bounds = documents.host_boundaries()
    return documents._once(("compressed keys", rate), lambda: compressed_keys(bounds, rate, documents.device))
