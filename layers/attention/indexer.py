"""The indexer of sparse attention (DeepSeek-V3.2, 2025, arXiv:2512.02556, section 2.1): small heads that
choose the keys each query attends to.

    q = q_latent @ W_q^T                    [heads, head_dim], the first or the last dimensions rotated
    k = LayerNorm(x @ W_k^T)                one head, rotated likewise
    w = x @ W_w^T / sqrt(heads)             one weight per head
    s_qk = sum_h w_qh relu(q_qh . k_k / sqrt(head_dim))

Without a latent of queries the indexer reads LayerNorm(x) in its place, and its queries have learned scales
by position if the layer's have (Mistral Large 4).

A query attends to the `top_k` keys of its document with the highest scores. In documents of at most that many
tokens it attends to all, and no score is computed. The choice has no gradient, so the loss of the model
trains nothing here: the indexer's parameters are frozen, unless they are trained by a loss of their own,
which moves the scores towards the attention of the layer (kernels/attention/indexer_loss.py).

The indexer of block-sparse attention (MiniMax-M3, 2026) chooses blocks of keys for each group of heads:

    q = rotate(norm(x @ W_q^T))             one head per group
    k = rotate(norm(x @ W_k^T))             one head for all
    s_qgb = max over the keys of block b, up to q, of q_qg . k_k

A block is `size` consecutive tokens of a document, counted from its start. A query attends to the `local`
last blocks up to its own and to those with the highest scores, `top_k` in all. In documents of at most that
many blocks it attends to all, and no score is computed. The choice has no gradient, and no loss of the
indexer has been published, so its parameters are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels import ChosenBlocks, choose_blocks, choose_keys, indexer_loss, rotary
from liger_models.kernels.attention.chosen_blocks import best_blocks
from liger_models.kernels.attention.chosen_keys import highest, index_scores
from liger_models.layers.attention.query_scale import LearnedQueryScale
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.float32_product import Float32Linear
from liger_models.layers.projections.linear import Linear
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AttentionSpec,
    BlockIndexerSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LayerNormSpec,
)


class Indexer(nn.Module):
    """The indexer of a layer with latent attention.

    Args:
        hidden_size: the width H of the hidden states.
        spec: of the layer.
        layer: the index of the layer.
    """

    untrained = True  # `freeze` leaves it frozen; `train_indexers` changes this

    def __init__(self, hidden_size: int, spec: LatentAttentionSpec, layer: int = 0):
        super().__init__()
        if not isinstance(spec.indexer, IndexerSpec):
            raise ValueError(f"an indexer of keys needs its spec, found {spec.indexer}")
        self.spec, self.rope, self.rotated, self.layer = spec.indexer, spec.rope, spec.qk_rope_head_dim, layer
        heads, dim = self.spec.num_heads, self.spec.head_dim
        self.scale = self.spec.scale * dim**-0.5
        if spec.q_lora_rank is None:
            self.q_input_norm = make_norm(hidden_size, LayerNormSpec(eps=1e-6))
        self.wq_b = Linear(spec.q_lora_rank or hidden_size, heads * dim, bias=False)
        self.wk = Linear(hidden_size, dim, bias=False)
        self.k_norm = make_norm(dim, LayerNormSpec(eps=self.spec.norm_eps))
        self.weights_proj = (Float32Linear if self.spec.float32_weights else Linear)(
            hidden_size, heads, False
        )
        self.softmax_scaling = LearnedQueryScale(heads) if spec.learned_query_scale else None
        self.requires_grad_(False)

    def forward(
        self, x: Tensor, q_latent: Tensor | None, keys: Tensor, sequences: Sequences
    ) -> Tensor | None:
        """Choose the keys of the tokens of this rank.

        Args:
            x: [t, H]; q_latent: [t, q_lora_rank], if queries have a latent.
            keys: [t, head_dim], from `keys`.
            sequences: the documents.

        Returns:
            Bits of the chosen keys, [t, words] int32 (`choose_keys`); None if all tokens attend to all keys.

        Raises:
            DataError: documents that continue others, with more than `top_k` tokens.
        """
        documents = sequences.documents
        if documents.max_seqlen <= self.spec.top_k:
            return None
        if documents.tree is not None:
            raise DataError(
                f"layer {self.layer} attends to {self.spec.top_k} chosen keys, which documents of "
                f"{documents.max_seqlen} tokens that continue others (parents) do not support: repeat the "
                "shared tokens in every document"
            )
        with torch.no_grad():
            q, weights = self._queries_and_weights(x, q_latent, sequences)
            part, first = sequences.slice, 0
            if part is not None:
                keys, first = part.gathered(keys), sum(part.sizes[: part.rank])
            return choose_keys(
                q,
                keys,
                weights,
                self.spec.top_k,
                scale=self.scale,
                longest=documents.max_seqlen,
                bounds=documents.bounds(),
                first_query=first,
            )

    def of_cached(
        self, x: Tensor, q_latent: Tensor | None, keys: Tensor, mask: Tensor, sequences: Sequences
    ) -> Tensor:
        """Choose among cached keys [batch, extent, head_dim] for the new tokens. Returns a part of `mask`
        [batch, new, extent].
        """
        if mask.shape[-1] <= self.spec.top_k:
            return mask
        with torch.no_grad():
            q, weights = (
                tensor.unflatten(0, mask.shape[:2])
                for tensor in self._queries_and_weights(x, q_latent, sequences)
            )
            mask = mask.to(q.device)
            scores = index_scores(q, keys.to(q.dtype), weights, self.scale)
            return highest(scores.masked_fill(~mask, float("-inf")), self.spec.top_k) & mask

    def keys(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The tokens' keys, [t, head_dim]."""
        with torch.no_grad():
            return self._keys(x, sequences)

    def loss(
        self,
        x: Tensor,
        q_latent: Tensor | None,
        layer: tuple[Tensor, Tensor, Tensor | None],
        scale: float,
        chosen: Tensor | None,
        sequences: Sequences,
    ) -> Tensor:
        """The divergence from the layer's attention, a mean over the tokens. Its gradients reach the
        indexer's parameters alone.

        Args:
            x, q_latent: as for `forward`.
            layer: q [T, heads, E], k [T, heads, E] and the sinks [heads], if there are any, of the layer.
            scale: of the layer's products.
            chosen: the keys that `forward` has chosen.

        Raises:
            DataError: documents that continue others, or sequences divided over processes.
        """
        documents = sequences.documents
        if documents.tree is not None or sequences.slice is not None:
            raise DataError(
                "indexer_weight needs whole documents in one process: leave out parents and sequence "
                "groups, or omit it"
            )
        x, q_latent = x.detach(), None if q_latent is None else q_latent.detach()
        own = self._queries_and_weights(x, q_latent, sequences)
        total = indexer_loss(
            *(own[0], self._keys(x, sequences), own[1], *layer[:2]),
            scale=self.scale,
            attention_scale=scale,
            sinks=layer[2],
            bounds=documents.bounds(),
            chosen=chosen,
            longest=documents.max_seqlen,
        )
        return total / max(1, len(x))

    def _keys(self, x: Tensor, sequences: Sequences) -> Tensor:
        return self._rotated(self.k_norm(self.wk(x))[:, None], sequences)[:, 0]

    def _queries_and_weights(
        self, x: Tensor, q_latent: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """[t, heads, head_dim] and, in at least float32, [t, heads]."""
        source = self.q_input_norm(x) if q_latent is None else q_latent
        q = self.wq_b(source).unflatten(-1, (self.spec.num_heads, -1))
        if self.softmax_scaling is not None:
            q = self.softmax_scaling(q, sequences)
        q = self._rotated(q, sequences)
        weights = self.weights_proj(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, weights * self.spec.num_heads**-0.5

    def _rotated(self, heads: Tensor, sequences: Sequences) -> Tensor:
        """[t, heads, head_dim] with the first dimensions rotated, or the last ones."""
        if self.rope is None:
            return heads
        rest, last = heads.shape[-1] - self.rotated, self.spec.rotates_last
        parts = list(heads.split([rest, self.rotated] if last else [self.rotated, rest], dim=-1))
        cos, sin = sequences.positions.rotary[self.rope]
        parts[last] = rotary(parts[last], parts[last][:, :1], cos, sin, self.spec.interleaved)[0]
        return torch.cat(parts, dim=-1)

    def extra_repr(self) -> str:
        return f"heads={self.spec.num_heads}, head_dim={self.spec.head_dim}, top_k={self.spec.top_k}"


class BlockIndexer(nn.Module):
    """The indexer of a layer with grouped heads.

    Args:
        hidden_size: the width H of the hidden states.
        spec: of the layer.
        layer: the index of the layer.

    Raises:
        ValueError: no indexer in the spec, or attention that is limited otherwise.
    """

    untrained = True  # `freeze` leaves it frozen

    def __init__(self, hidden_size: int, spec: AttentionSpec, layer: int = 0):
        super().__init__()
        if not isinstance(spec.indexer, BlockIndexerSpec) or spec.qk_norm is None:
            raise ValueError("an indexer needs its spec and a norm (qk_norm)")
        if spec.num_attention_heads % spec.indexer.num_groups:
            raise ValueError("an indexer needs groups that divide the heads")
        self.spec, self.rope, self.layer = spec.indexer, spec.rope, layer
        groups, dim = self.spec.num_groups, self.spec.head_dim
        self.q_proj = Linear(hidden_size, groups * dim, bias=False)
        self.k_proj = Linear(hidden_size, dim, bias=False)
        self.q_norm, self.k_norm = make_norm(dim, spec.qk_norm.norm), make_norm(dim, spec.qk_norm.norm)
        self.requires_grad_(False)

    def forward(self, x: Tensor, keys: Tensor, sequences: Sequences) -> ChosenBlocks | None:
        """Choose the blocks of the tokens of this rank.

        Args:
            x: [t, H].
            keys: [t, head_dim], from `projected`.
            sequences: the documents.

        Returns:
            The blocks of the t tokens; None if all tokens attend to all keys.

        Raises:
            DataError: documents that continue others, with more than `top_k` blocks.
        """
        documents, spec = sequences.documents, self.spec
        if documents.max_seqlen <= spec.top_k * spec.size:
            return None
        if documents.tree is not None:
            raise DataError(
                f"layer {self.layer} attends to {spec.top_k} chosen blocks of {spec.size} keys, which "
                f"documents of {documents.max_seqlen} tokens that continue others (parents) do not support: "
                "repeat the shared tokens in every document"
            )
        with torch.no_grad():
            part, first = sequences.slice, 0
            if part is not None:
                keys, first = part.gathered(keys), sum(part.sizes[: part.rank])
            return choose_blocks(
                self._queries(x, sequences),
                keys,
                spec.top_k,
                size=spec.size,
                local=spec.local,
                longest=documents.max_seqlen,
                bounds=documents.bounds(),
                first_query=first,
            )

    def of_cached(self, x: Tensor, kept: Sequence[Tensor], mask: Tensor, sequences: Sequences) -> Tensor:
        """Choose among cached keys, which are all that is `kept`, [batch, extent, head_dim], for the new
        tokens. Returns `mask` [batch, new, extent], or a part of it for each group, [batch, groups, new,
        extent].
        """
        spec, (keys,) = self.spec, kept
        if mask.shape[-1] <= spec.top_k * spec.size:
            return mask
        with torch.no_grad():
            q = self._queries(x, sequences).unflatten(0, mask.shape[:2])
            mask = mask.to(q.device)
            best, block = best_blocks(q, keys.to(q.dtype), mask, spec.size, spec.top_k, spec.local)
            of_keys = best.gather(-1, block[:, :, None].expand(*best.shape[:-1], -1))
            return (of_keys & mask[:, :, None]).transpose(1, 2)

    def projected(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """x [t, H], from which `forward` computes the queries, and the tokens' keys [t, head_dim]."""
        with torch.no_grad():
            return x, self._rotated(self.k_norm(self.k_proj(x)).to(x.dtype)[:, None], sequences)[:, 0]

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate the tokens' keys, [batch, max_length, head_dim]."""
        return (torch.zeros(batch, max_length, self.spec.head_dim, device=device, dtype=dtype),)

    def _queries(self, x: Tensor, sequences: Sequences) -> Tensor:
        """[t, groups, head_dim]."""
        q = self.q_proj(x).unflatten(-1, (self.spec.num_groups, -1))
        return self._rotated(self.q_norm(q).to(x.dtype), sequences)

    def _rotated(self, heads: Tensor, sequences: Sequences) -> Tensor:
        if self.rope is None:
            return heads
        return rotary(heads, heads[:, :0], *sequences.positions.rotary[self.rope], self.rope.interleaved)[0]

    def extra_repr(self) -> str:
        spec = self.spec
        return f"groups={spec.num_groups}, head_dim={spec.head_dim}, top_k={spec.top_k} of {spec.size} keys"
