"""Attention of tokens to image features (Llama 3.2 Vision; Alayrac et al., 2022, arXiv:2204.14198).

    q = norm(x @ W_q^T),   k = norm(f @ W_k^T),   v = f @ W_v^T
    out = softmax(scale * q k^T, over the visible tiles) v @ W_o^T

with features f of image tiles, and norms over each head. A token attends to whole tiles. Packed documents run
one by one against their own images, so the work is the sum over documents, not the product of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.fused import masked_attention
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.part import Part
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import CrossAttentionSpec


@dataclass(frozen=True, eq=False)
class VisibleTiles(Part):
    """The image tiles that each token attends to.

    Attributes:
        mask: [batch, seq, tiles] bool, for each token of the batch and each tile of its row. It is all true
            for tokens without tiles, which `any` excludes.
        any: [T, 1] bool, the tokens that attend to some tile.
        shown: [T, 1] bool, the tokens for which the call's mask has a tile. (In the reference the others
            attend to all tiles of their row, and only skip the MLP after that.)
        blocks: for a single row, if known on the host: (first token, end, first tile, end) of each run of
            tokens that attends to no other tiles, in order; together they cover all tokens.
    """

    mask: Tensor
    any: Tensor
    shown: Tensor
    blocks: list[tuple[int, int, int, int]] | None = None

    def last(self, documents: Documents, lengths: Tensor) -> VisibleTiles:
        """The tiles of the last token of each sequence, given the lengths [batch]."""
        token = lengths.cumsum(0) - 1
        return VisibleTiles(documents.pack(self.mask)[token][:, None], self.any[token], self.shown[token])


class CrossAttention(nn.Module):
    """Attention to image features.

    Args:
        hidden_size: the width H of the hidden states and of the features.
        spec: heads and norms.
        layer: the index of this layer in the model.
        backend: unused; torch has the only implementation.
    """

    def __init__(
        self, hidden_size: int, spec: CrossAttentionSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec, self.layer = spec, layer
        self.q_proj = Linear(hidden_size, spec.q_size, bias=False)
        self.kv_proj = PackedLinear(hidden_size, {"k_proj": spec.kv_size, "v_proj": spec.kv_size})
        self.o_proj = Linear(spec.q_size, hidden_size, bias=False)
        self.q_norm = make_norm(spec.head_dim, spec.norm)
        self.k_norm = make_norm(spec.head_dim, spec.norm)

    def forward(self, x: Tensor, sequences: Sequences, images: Tensor) -> Tensor:
        """x [T, H], images [batch, K, H] -> [T, H]."""
        sequences = sequences.on(x.device)
        spec, visible, cache = self.spec, sequences.visibility.tiles, sequences.cache
        assert visible is not None
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, spec.head_dim)))
        made = None if cache is None else cache.of_images.get(self.layer)
        if made is None:
            k, v = self.kv_proj(images).unflatten(-1, (-1, spec.head_dim)).chunk(2, dim=2)
            made = self.k_norm(k), v
        if cache is not None:
            cache.of_images[self.layer] = made
        k, v = made
        if visible.blocks is None:
            out = sequences.pack(self._attend(sequences.unpack(q), k, v, visible.mask))
        else:
            of_tile, pieces = k.shape[1] // visible.mask.shape[2], []
            for first, end, first_tile, end_tile in visible.blocks:
                own, tiles = q[None, first:end], slice(first_tile, end_tile)
                keys = slice(first_tile * of_tile, end_tile * of_tile)
                none = first_tile == end_tile or first == end
                mask = visible.mask[:, first:end, tiles]
                pieces.append(
                    (torch.zeros_like(own) if none else self._attend(own, k[:, keys], v[:, keys], mask))[0]
                )
            out = torch.cat(pieces)
        return self.o_proj(torch.where(visible.any, out.flatten(1), 0))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention of q [batch, seq, heads, dim] to k, v [batch, K, kv_heads, dim] of the tiles in `mask`
        [batch, seq, tiles] -> [batch, seq, heads, dim].
        """
        groups = self.spec.num_attention_heads // self.spec.num_key_value_heads
        k, v = (y.repeat_interleave(groups, dim=2).transpose(1, 2) for y in (k, v))
        mask = mask.repeat_interleave(k.shape[2] // mask.shape[2], dim=2)[:, None]
        out = masked_attention(q.transpose(1, 2), k, v, mask, self.spec.scale)
        return out.transpose(1, 2)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: the number of keys is known once there are images (`KVCache.of_images`)."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: q before and after its norm, the output, and in float32 statistics
        and the log-sum-exp of each head. Keys and values belong to images.
        """
        return 3 * itemsize * self.spec.q_size + 8 * self.spec.num_attention_heads

    def image_bytes(self, itemsize: int) -> int:
        """Bytes kept per image feature on a GPU: k before its norm, v, both repeated for all query heads, and
        in float32 the statistic of each head.
        """
        spec = self.spec
        return itemsize * (2 * spec.kv_size + 2 * spec.q_size) + 4 * spec.num_key_value_heads

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}/{spec.num_key_value_heads}, head_dim={spec.head_dim}"
