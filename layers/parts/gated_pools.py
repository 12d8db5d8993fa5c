"""The indexer of pools of keys (GLM-5.3-Flash, Z.ai, 2026): small heads that choose the pools each query
attends to.

    q = q_latent @ W_q^T                                    [heads, head_dim]
    k = LayerNorm(x @ W_k^T),   g = x @ W_g^T               one head per token
    k_b = sum over the tokens t of pool b of softmax_t(g_t + bias_t) k_t            a softmax of each channel
    w = x @ W_w^T / sqrt(heads)                             one weight per head
    s_qb = sum_h w_qh relu(q_qh . k_b / sqrt(head_dim))

A pool is `size` consecutive tokens of a document, counted from its start. A query attends to the `top_k`
pools with the highest scores of those that end up to it, and to the tokens of its own pool up to it, if that
does not end there. In documents with at most that many whole pools it attends to all, and no score is
computed. The choice has no gradient, and no loss of the indexer has been published, so its parameters are
frozen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels import ChosenBlocks
from liger_models.kernels.attention.choose_compressed import choose_compressed
from liger_models.kernels.attention.chosen_keys import highest, index_scores, pack_bits
from liger_models.kernels.attention.compressed_keys import CompressedKeys, compressed_keys
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedPoolsSpec, LatentAttentionSpec, LayerNormSpec

_SLICE = 1 << 25  # queries times pools whose bits are made at once


class GatedPoolIndexer(nn.Module):
    """The indexer of a layer with latent attention.

    Args:
        hidden_size: the width H of the hidden states.
        spec: of the layer.
        layer: the index of the layer.

    Raises:
        ValueError: another indexer, or queries without a latent.
    """

    untrained = True  # `freeze` leaves it frozen
    stacked_vectors = ("index_kpool_compress_ape",)

    def __init__(self, hidden_size: int, spec: LatentAttentionSpec, layer: int = 0):
        super().__init__()
        if not isinstance(spec.indexer, GatedPoolsSpec) or spec.q_lora_rank is None:
            raise ValueError("an indexer of pools needs its spec, and queries with a latent")
        self.spec, self.layer = spec.indexer, layer
        heads, dim = self.spec.num_heads, self.spec.head_dim
        self.scale = dim**-0.5
        self.wq_b = Linear(spec.q_lora_rank, heads * dim, bias=False)
        self.wk = Linear(hidden_size, dim, bias=False)
        self.k_norm = make_norm(dim, LayerNormSpec(eps=1e-6))
        self.weights_proj = Linear(hidden_size, heads, bias=False)
        self.index_kpool_compress_ape = nn.Parameter(torch.empty(self.spec.size, dim))
        self.index_kpool_compress_gate = nn.Parameter(torch.empty(dim, hidden_size))
        self.reset_parameters()
        self.requires_grad_(False)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the gate's matrix from a normal distribution and its biases with zeros."""
        nn.init.normal_(self.index_kpool_compress_gate, 0.0, std, generator)
        nn.init.zeros_(self.index_kpool_compress_ape)

    def forward(
        self, x: Tensor, q_latent: Tensor | None, keys: Tensor, sequences: Sequences
    ) -> ChosenBlocks | None:
        """Choose the pools of all tokens.

        Args:
            x: [T, H]; q_latent: [T, q_lora_rank].
            keys: [T, 2 head_dim], from `keys`.
            sequences: the documents.

        Returns:
            The pools, as blocks of keys; None if all tokens attend to all keys.

        Raises:
            DataError: documents that continue others, or sequences divided over processes.
        """
        documents, spec = sequences.documents, self.spec
        if documents.max_seqlen < (spec.top_k + 1) * spec.size:
            return None
        if documents.tree is not None or sequences.slice is not None:
            raise DataError(
                f"layer {self.layer} attends to {spec.top_k} chosen pools of {spec.size} keys, which "
                f"documents of {documents.max_seqlen} tokens that continue others (parents) and sequences "
                "divided over processes do not support: repeat the shared tokens in every document, and "
                "leave sequences whole"
            )
        with torch.no_grad():
            boundaries = documents.host_boundaries()
            places = documents._once(
                ("compressed keys", spec.size),
                lambda: compressed_keys(boundaries, spec.size, documents.device),
            )
            pools = self._pools(keys[places.first[:, None] + torch.arange(spec.size, device=keys.device)])
            q, weights = self._queries_and_weights(x, q_latent)
            chosen = choose_compressed(q, pools, weights, places, spec.top_k, scale=self.scale)
            return ChosenBlocks(self._bits(chosen, places)[:, None], spec.size)

    def of_cached(
        self, x: Tensor, q_latent: Tensor | None, keys: Tensor, mask: Tensor, sequences: Sequences
    ) -> Tensor:
        """Choose among cached keys [batch, extent, 2 head_dim] for the new tokens. Returns a part of `mask`
        [batch, new, extent].
        """
        spec, (batch, new, extent) = self.spec, mask.shape
        if extent < (spec.top_k + 1) * spec.size:
            return mask
        with torch.no_grad():
            q, weights = (y.unflatten(0, (batch, new)) for y in self._queries_and_weights(x, q_latent))
            mask = mask.to(q.device)
            place = mask.cumsum(-1) - 1  # of each key among those that a query sees
            first = mask.int().argmax(-1)[:, -1]  # the slot of each sequence's first token
            slots = first[:, None] + torch.arange(extent // spec.size * spec.size, device=q.device)
            own = slots.clamp(max=extent - 1)
            rows = keys.gather(1, own[..., None].expand(-1, -1, keys.shape[-1])).to(q.dtype)
            pools = self._pools(rows.unflatten(1, (-1, spec.size)))
            ends = slots[:, None, spec.size - 1 :: spec.size].expand(-1, new, -1)
            seen = mask.gather(-1, ends.clamp(max=extent - 1)) & (ends < extent)
            scores = index_scores(q, pools, weights, self.scale)
            best = highest(scores.masked_fill(~seen, float("-inf")), spec.top_k) & seen
            best = torch.cat([best, best.new_zeros(batch, new, 1)], -1)
            pool = (place.clamp(min=0) // spec.size).clamp(max=best.shape[-1] - 1)
            count = mask.sum(-1, keepdim=True)
            tail = place >= count // spec.size * spec.size
            return (best.gather(-1, pool) | tail) & mask

    def keys(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The tokens' keys and gates, [T, 2 head_dim]."""
        with torch.no_grad():
            gates = nn.functional.linear(x, self.index_kpool_compress_gate)
            return torch.cat([self.k_norm(self.wk(x)).to(x.dtype), gates], -1)

    def _pools(self, rows: Tensor) -> Tensor:
        """Keys and gates of pools' tokens [..., size, 2 head_dim] -> the pools' keys [..., head_dim]."""
        keys, gates = rows.chunk(2, dim=-1)
        wide = torch.promote_types(gates.dtype, torch.float32)
        shares = (gates.to(wide) + self.index_kpool_compress_ape.to(wide)).softmax(-2).to(keys.dtype)
        return (shares * keys).sum(-2)

    def _queries_and_weights(self, x: Tensor, q_latent: Tensor | None) -> tuple[Tensor, Tensor]:
        """[T, heads, head_dim] and, in at least float32, [T, heads]."""
        assert q_latent is not None
        q = self.wq_b(q_latent).unflatten(-1, (self.spec.num_heads, -1))
        weights = self.weights_proj(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, weights * self.spec.num_heads**-0.5

    def _bits(self, chosen: Tensor, places: CompressedKeys) -> Tensor:
        """Bits of the chosen pools by their numbers in the document, and of each query's own pool unless it
        ends there, [T, words].
        """
        tokens, words = len(chosen), places.most // 32 + 1  # the last pool may not be whole
        number = torch.cat([places.number, places.number.new_full((1,), 32 * words)])
        place = torch.arange(1, tokens + 1, device=chosen.device)[:, None] - places.start
        whole = place % self.spec.size == 0
        tail = torch.where(whole, 32 * words, place // self.spec.size)
        found = torch.cat([number[chosen.long()], tail], 1)
        bits = []
        for part in found.split(max(1, _SLICE // (32 * words))):
            mask = torch.zeros(len(part), 32 * words + 1, dtype=torch.bool, device=part.device)
            bits.append(pack_bits(mask.scatter_(1, part, True)[:, :-1], words))
        return torch.cat(bits)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_heads}, head_dim={spec.head_dim}, top_k={spec.top_k} of {spec.size} keys"
