"""Attention of tokens to features of images (Llama 3.2 Vision; Alayrac et al., 2022, arXiv:2204.14198).

    q = norm(x @ W_q^T),   k = norm(f @ W_k^T),   v = f @ W_v^T
    out = softmax(scale * q k^T, over what is seen) v @ W_o^T

with features f of the tiles of images, and norms over each head. A token sees tiles as a whole. Of documents
in one row each meets its own images alone: the work is the sum of theirs, not the product of the sums.
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
class SeenTiles(Part):
    """Which tiles of images the tokens see.

    Attributes:
        mask: of each token of the batch and each tile of its row, [batch, seq, tiles] bool. Where a token
            sees none, all are there, and `any` decides.
        any: which of the T tokens attend to some tile, [T, 1] bool.
        shown: which of them have been shown one, [T, 1] bool. (In the reference others attend to all tiles
            of their row, and this alone is left out behind them: the MLP.)
        blocks: of one row, where that is known on the host, (first token, end, first tile, end) of each run
            of tokens that sees no other tiles, in order; together they are all tokens.
    """

    mask: Tensor
    any: Tensor
    shown: Tensor
    blocks: list[tuple[int, int, int, int]] | None = None

    def last(self, documents: Documents, lengths: Tensor) -> SeenTiles:
        """Of the last token of each sequence, of these lengths [batch]."""
        token = lengths.cumsum(0) - 1
        return SeenTiles(documents.pack(self.mask)[token][:, None], self.any[token], self.shown[token])


class CrossAttention(nn.Module):
    """Attention to features of images.

    Args:
        hidden_size: the width H of the hidden states, and of the features.
        spec: heads and norms.
        layer: this layer's place in the model.
        backend: accepted as everywhere; there is one implementation, torch's.
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
        spec, seen, cache = self.spec, sequences.visibility.tiles, sequences.cache
        assert seen is not None
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, spec.head_dim)))
        made = None if cache is None else cache.of_images.get(self.layer)
        if made is None:
            k, v = self.kv_proj(images).unflatten(-1, (-1, spec.head_dim)).chunk(2, dim=2)
            made = self.k_norm(k), v
        if cache is not None:
            cache.of_images[self.layer] = made
        k, v = made
        if seen.blocks is None:
            out = sequences.pack(self._attend(sequences.unpack(q), k, v, seen.mask))
        else:
            of_tile, pieces = k.shape[1] // seen.mask.shape[2], []
            for first, end, first_tile, end_tile in seen.blocks:
                own, tiles = q[None, first:end], slice(first_tile, end_tile)
                keys = slice(first_tile * of_tile, end_tile * of_tile)
                none = first_tile == end_tile or first == end
                mask = seen.mask[:, first:end, tiles]
                pieces.append(
                    (torch.zeros_like(own) if none else self._attend(own, k[:, keys], v[:, keys], mask))[0]
                )
            out = torch.cat(pieces)
        return self.o_proj(torch.where(seen.any, out.flatten(1), 0))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [batch, seq, heads, dim], k and v [batch, K, kv_heads, dim] of tiles that `mask` [batch, seq,
        tiles] tells -> [batch, seq, heads, dim].
        """
        groups = self.spec.num_attention_heads // self.spec.num_key_value_heads
        k, v = (y.repeat_interleave(groups, dim=2).transpose(1, 2) for y in (k, v))
        mask = mask.repeat_interleave(k.shape[2] // mask.shape[2], dim=2)[:, None]
        out = masked_attention(q.transpose(1, 2), k, v, mask, self.spec.scale)
        return out.transpose(1, 2)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: how many keys images have is known when they are there (`KVCache.of_images`)."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Of a token, as on a GPU: q before and behind its norm, the output, and in float32 statistics and
        the log-sum-exp of each head. Keys and values are of images.
        """
        return 3 * itemsize * self.spec.q_size + 8 * self.spec.num_attention_heads

    def image_bytes(self, itemsize: int) -> int:
        """Kept of a feature of images, as on a GPU: k before its norm beside v, both as all heads of queries
        meet them, and in float32 the statistic of each head.
        """
        spec = self.spec
        return itemsize * (2 * spec.kv_size + 2 * spec.q_size) + 4 * spec.num_key_value_heads

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}/{spec.num_key_value_heads}, head_dim={spec.head_dim}"
