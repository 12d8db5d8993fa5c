"""The indexer of blocks of keys with a mean key each (Qwen4, 2026).

    q = rotate(norm(x @ W_q^T))             [heads, head_dim]
    k_b = rotate(norm(mean of x @ W_k^T))   over the `size` tokens of block b of a document, like its first
    s_qb = sum_h relu(q_qh . k_b / sqrt(head_dim))

A query attends to the `top_k` blocks with the highest scores of those that end at it or before, and to all
tokens after the last of these. In documents of at most `top_k` whole blocks it attends to all, and no score
is computed. The choice has no gradient, and no loss of the indexer has been published, so its parameters are
frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels import ChosenBlocks, rotary
from liger_models.kernels._dispatch import at_least_float32
from liger_models.kernels.attention.choose_compressed import as_blocks, choose_compressed
from liger_models.kernels.attention.chosen_keys import highest, index_scores
from liger_models.kernels.attention.compressed_keys import CompressedKeys, compressed_keys
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec, PooledIndexerSpec

Tables = tuple[Tensor, Tensor]


class PooledIndexer(nn.Module):
    """The indexer of a layer with grouped heads.

    Args:
        hidden_size: the width H of the hidden states.
        spec: of the layer.
        layer: the index of the layer.

    Raises:
        ValueError: no indexer in the spec, or a layer without norms or rotation.
    """

    untrained = True  # `freeze` leaves it frozen

    def __init__(self, hidden_size: int, spec: AttentionSpec, layer: int = 0):
        super().__init__()
        if not isinstance(spec.indexer, PooledIndexerSpec) or spec.qk_norm is None or spec.rope is None:
            raise ValueError("an indexer of mean keys needs its spec, norms (qk_norm) and positions (rope)")
        self.spec, self.rope, self.layer = spec.indexer, spec.rope, layer
        if self.rope.dim > self.spec.head_dim:
            raise ValueError(
                f"an indexer of mean keys has heads of {self.spec.head_dim}, of which {self.rope.dim} "
                "dimensions are to be rotated; expected no more than it has"
            )
        heads, dim = self.spec.num_heads, self.spec.head_dim
        self.index_qk_proj = Linear(hidden_size, (heads + 1) * dim, bias=False)
        norms = (make_norm(dim, spec.qk_norm.norm) for _ in range(2))
        self.q_layernorm, self.k_layernorm = norms
        self.requires_grad_(False)

    def projected(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        """x [T, H] -> its queries before their norm, [T, heads * head_dim], and what the tokens add to their
        block's key, [T, head_dim]; with a cache also their positions, [T, axes], since later calls rotate the
        keys of blocks.
        """
        with torch.no_grad():
            dim = self.spec.head_dim
            queries, keys = self.index_qk_proj(x).split([self.spec.num_heads * dim, dim], dim=-1)
            if sequences.cache is None:
                return queries, keys.contiguous()
            positions = sequences.positions.of(self.rope).expand(self._axes, -1)
            return queries, keys.contiguous(), positions.T

    @property
    def _axes(self) -> int:
        return 1 if self.rope.axes is None else max(self.rope.axes) + 1

    def forward(self, queries: Tensor, keys: Tensor, sequences: Sequences) -> ChosenBlocks | None:
        """Choose the blocks of each token.

        Args:
            queries, keys: from `projected`.
            sequences: the documents.

        Returns:
            The blocks of the tokens; None if all tokens attend to all keys.

        Raises:
            DataError: documents that continue others, with more than `top_k` blocks.
        """
        documents, spec = sequences.documents, self.spec
        if documents.max_seqlen // spec.size <= spec.top_k:
            return None
        if documents.tree is not None:
            raise DataError(
                f"layer {self.layer} attends to {spec.top_k} chosen blocks of {spec.size} keys, which "
                f"documents of {documents.max_seqlen} tokens that continue others (parents) do not support: "
                "repeat the shared tokens in every document"
            )
        bounds, device = documents.host_boundaries(), documents.device
        places: CompressedKeys = documents._once(
            ("compressed keys", spec.size), lambda: compressed_keys(bounds, spec.size, device)
        )
        cos, sin = sequences.positions.rotary[self.rope]
        with torch.no_grad():
            of_block = places.first[:, None] + torch.arange(spec.size, device=device)
            pooled = self._pooled(keys[of_block], (cos[places.first], sin[places.first]))
            q = self._queries(queries, (cos, sin))
            weights = torch.ones(q.shape[:2], device=q.device)
            chosen = choose_compressed(q, pooled, weights, places, spec.top_k, scale=spec.head_dim**-0.5)
            return as_blocks(chosen, places)

    def of_cached(
        self, queries: Tensor, kept: Sequence[Tensor], mask: Tensor, sequences: Sequences
    ) -> Tensor:
        """Choose among cached tokens for the new ones. Returns a part of `mask` [batch, new, extent].

        Args:
            queries: from `projected`.
            kept: the keys [batch, extent, head_dim] and positions [batch, extent, axes] of cached tokens.
            mask: which of them each new token sees.
            sequences: the new tokens.
        """
        keys, positions = kept
        spec, (batch, extent, _), cache = self.spec, keys.shape, sequences.cache
        if extent // spec.size <= spec.top_k:
            return mask
        assert cache is not None
        device = queries.device
        mask = mask.to(device).expand(batch, -1, -1)
        place, start = cache.places()
        number = torch.arange(extent // spec.size, device=device)
        with torch.no_grad():
            slots = start[:, None] + torch.arange(len(number) * spec.size, device=device)
            index = slots.clamp(max=extent - 1)[..., None]
            of_blocks = keys.gather(1, index.expand(-1, -1, keys.shape[2]))
            of_blocks = of_blocks.unflatten(1, (-1, spec.size)).flatten(0, 1)
            index = index[:, :: spec.size].expand(-1, -1, positions.shape[2])
            first = positions.gather(1, index).flatten(0, 1)  # [batch * blocks, axes]
            first = first[:, 0] if self.rope.axes is None else first.T
            tables = rotary_tables(self.rope, first, sequences.positions.end)
            pooled = self._pooled(of_blocks.to(queries.dtype), tables).unflatten(0, (batch, -1))
            tables = sequences.positions.rotary[self.rope]
            q = self._queries(queries, tables).unflatten(0, place.shape)
            scores = index_scores(q, pooled, q.new_ones(q.shape[:3]), spec.head_dim**-0.5)
            visible = mask.sum(-1, keepdim=True)
            whole = visible // spec.size
            seen = number < whole
            best = highest(scores.masked_fill(~seen, float("-inf")), spec.top_k) & seen
            block = (torch.arange(extent, device=device) - start[:, None]).clamp(min=0) // spec.size
            best = torch.nn.functional.pad(best, (0, 1))  # keys after the last whole block of the cache
            own = block[:, None].expand(-1, best.shape[1], -1)
            # Padding attends to itself alone.
            return mask & (best.gather(2, own.clamp(max=len(number))) | (own == whole) | (visible == 1))

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate what the tokens add to their block's key, [batch, max_length, head_dim], and positions,
        [batch, max_length, axes].
        """
        keys = torch.zeros(batch, max_length, self.spec.head_dim, device=device, dtype=dtype)
        return keys, torch.zeros(batch, max_length, self._axes, device=device, dtype=torch.int32)

    def _queries(self, queries: Tensor, tables: Tables) -> Tensor:
        """[T, heads, head_dim]."""
        q = queries.unflatten(-1, (self.spec.num_heads, -1))
        return self._rotated(self.q_layernorm(q).to(q.dtype), tables)

    def _pooled(self, keys: Tensor, tables: Tables) -> Tensor:
        """[W, size, head_dim] -> the blocks' keys, [W, head_dim]."""
        mean = at_least_float32(keys).mean(1).to(keys.dtype)
        return self._rotated(self.k_layernorm(mean).to(keys.dtype)[:, None], tables)[:, 0]

    def _rotated(self, heads: Tensor, tables: Tables) -> Tensor:
        return rotary(heads, heads[:, :0], *tables, self.rope.interleaved)[0]

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_heads}, head_dim={spec.head_dim}, top_k={spec.top_k} of {spec.size} keys"
