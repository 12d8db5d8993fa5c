"""Compressed keys: one for every `rate` tokens of a document (DeepSeek-V4, 2026).

    key w:  norm(sum_t softmax_t(gate_t + bias_t) * kv_t),      kv, gate = split(x @ W^T)
            over its tokens w * rate to (w + 1) * rate, with a softmax of each channel

With `overlapping`, kv and gate are twice as wide: a token's second half counts in its own key, and its first
half in the next one, in the same softmax. The keys are rotated like their first token. Tokens after the last
whole key of a document have none.

An indexer scores the keys by keys of its own, which a further compressor makes; with q_latent of the layer:

    s_tw = sum_h weights_th relu(q_th . k_w / sqrt(d)),   q = rotate(q_latent @ W_q^T),
                                                          weights = x @ W_w^T / sqrt(heads)

A query attends to the `top_k` keys with the highest scores of those that it sees, or to all if there are no
more. The choice has no gradient, so the indexer's parameters are frozen, unless they are trained by a loss of
their own (kernels/attention/indexer_loss.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.kernels import rotary
from liger_models.kernels.attention.choose_compressed import choose_compressed
from liger_models.kernels.attention.chosen_keys import highest, index_scores
from liger_models.kernels.attention.compressed_keys import CompressedKeys
from liger_models.kernels.attention.indexer_loss import compressed_indexer_loss
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.specs import CompressedAttentionSpec, CompressorSpec, IndexerSpec, NormSpec

Tables = tuple[Tensor, Tensor]


class Compressor(nn.Module):
    """Makes compressed keys of `dim` elements.

    Args:
        hidden_size: the width H of the hidden states.
        dim: the width of the keys.
        spec: tokens of a key, and whether they overlap.
        norm: of the keys.
    """

    stacked_vectors = ("position_bias",)

    def __init__(self, hidden_size: int, dim: int, spec: CompressorSpec, norm: NormSpec):
        super().__init__()
        self.rate, self.overlapping, self.dim = spec.rate, spec.overlapping, dim
        self.width = 2 * dim if spec.overlapping else dim
        self.kv_gate_proj = PackedLinear(hidden_size, {"kv_proj": self.width, "gate_proj": self.width})
        self.position_bias = nn.Parameter(torch.zeros(spec.rate, self.width))
        self.kv_norm = make_norm(dim, norm)

    def reset_parameters(self, *_: object) -> None:
        """Initialise the biases with zeros; projections and norms are modules of their own."""
        nn.init.zeros_(self.position_bias)

    def forward(self, projected: Tensor, first: Tensor, number: Tensor, tables: Tables) -> Tensor:
        """The keys [W, dim].

        Args:
            projected: [T, 2 width], by `kv_gate_proj`.
            first: [W], the first token of each key, whose `rate` tokens follow one another.
            number: [W], the number of each key in its document.
            tables: cosines and sines of the keys, [W, R / 2] each.
        """
        own = first[:, None] + torch.arange(self.rate, device=first.device)  # [W, rate]
        parts, bias = projected.split(self.dim, dim=-1), self.position_bias.split(self.dim, dim=-1)
        if self.overlapping:
            earlier = (own - self.rate).clamp(min=0)
            kv = torch.cat([parts[0][earlier], parts[1][own]], 1)  # [W, 2 rate, dim]
            none = (number == 0)[:, None, None]
            before = (parts[2][earlier] + bias[0]).masked_fill(none, float("-inf"))
            gate = torch.cat([before, parts[3][own] + bias[1]], 1)
        else:
            kv, gate = parts[0][own], parts[1][own] + bias[0]
        wide = torch.promote_types(gate.dtype, torch.float32)
        mean = (gate.to(wide).softmax(1) * kv).sum(1).to(projected.dtype)
        return rotate_last(self.kv_norm(mean)[:, None], tables)[:, 0]

    def extra_repr(self) -> str:
        return f"rate={self.rate}, overlapping={self.overlapping}, dim={self.dim}"


class CompressedIndexer(nn.Module):
    """Chooses compressed keys.

    Args:
        hidden_size: the width H of the hidden states.
        spec: of the layer.
        compressor: of the layer, with an indexer.
    """

    untrained = True  # `freeze` leaves it frozen; `train_indexers` changes this

    def __init__(self, hidden_size: int, spec: CompressedAttentionSpec, compressor: CompressorSpec):
        super().__init__()
        if compressor.indexer is None:
            raise ValueError("an indexer of compressed keys needs its spec, found None")
        self.spec: IndexerSpec = compressor.indexer
        heads, dim = self.spec.num_heads, self.spec.head_dim
        if dim < spec.rope.dim or not self.spec.interleaved:
            raise ValueError(
                f"an indexer of compressed keys has neighbouring dimensions rotated, {spec.rope.dim} of its "
                f"heads; found heads of {dim}, interleaved {self.spec.interleaved}"
            )
        self.scale = dim**-0.5
        self.compressor = Compressor(hidden_size, dim, compressor, spec.norm)
        self.q_b_proj = Linear(spec.q_lora_rank, heads * dim, bias=False)
        self.weights_proj = Linear(hidden_size, heads, bias=False)
        self.requires_grad_(False)

    def forward(
        self, x: Tensor, q_latent: Tensor, places: CompressedKeys, tables: Tables, of_keys: Tables
    ) -> Tensor | None:
        """Choose the keys of each token.

        Args:
            x: [T, H]; q_latent: [T, q_lora_rank].
            places: of the compressed keys.
            tables: cosines and sines of the tokens; of_keys: those of the keys.

        Returns:
            [T, n] int32, from `choose_compressed`; None if no token sees more than `top_k` keys.
        """
        if places.most <= self.spec.top_k:
            return None
        with torch.no_grad():
            keys = self._keys(x, places, of_keys)
            q, weights = self._queries_and_weights(x, q_latent, tables)
            return choose_compressed(q, keys, weights, places, self.spec.top_k, scale=self.scale)

    def of_cached(self, x: Tensor, q_latent: Tensor, keys: Tensor, seen: Tensor, tables: Tables) -> Tensor:
        """Choose among keys [batch, W, dim] for new tokens, x [batch * new, H]. Returns a part of `seen`
        [batch, new, W].
        """
        if seen.shape[-1] <= self.spec.top_k:
            return seen
        with torch.no_grad():
            q, weights = (
                part.unflatten(0, seen.shape[:2]) for part in self._queries_and_weights(x, q_latent, tables)
            )
            scores = index_scores(q, keys.to(q.dtype), weights, self.scale)
            return highest(scores.masked_fill(~seen, float("-inf")), self.spec.top_k) & seen

    def loss(
        self,
        x: Tensor,
        q_latent: Tensor,
        layer: tuple[Tensor, Tensor, Tensor, Tensor],
        places: CompressedKeys,
        tables: Tables,
        of_keys: Tables,
        *,
        scale: float,
        window: int,
        chosen: Tensor | None,
    ) -> Tensor:
        """The divergence from the layer's attention, a mean over the tokens. Its gradients reach the
        indexer's parameters alone.

        Args:
            x, q_latent, places, tables, of_keys: as for `forward`.
            layer: queries, keys, compressed keys and sinks of the layer's attention.
            scale, window: of the layer's attention.
            chosen: the keys that `forward` has chosen.
        """
        x, q_latent = x.detach(), q_latent.detach()
        q, weights = self._queries_and_weights(x, q_latent, tables)
        total = compressed_indexer_loss(
            *(q, self._keys(x, places, of_keys), weights, *layer, places),
            scale=self.scale,
            attention_scale=scale,
            window=window,
            chosen=chosen,
        )
        return total / max(1, len(x))

    def _keys(self, x: Tensor, places: CompressedKeys, tables: Tables) -> Tensor:
        """[W, dim]."""
        return self.compressor(self.compressor.kv_gate_proj(x), places.first, places.number, tables)

    def _queries_and_weights(self, x: Tensor, q_latent: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """[t, heads, dim] and, in at least float32, [t, heads]."""
        q = rotate_last(self.q_b_proj(q_latent).unflatten(-1, (self.spec.num_heads, -1)), tables)
        weights = self.weights_proj(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, weights * self.spec.num_heads**-0.5

    def extra_repr(self) -> str:
        return f"heads={self.spec.num_heads}, head_dim={self.spec.head_dim}, top_k={self.spec.top_k}"


def rotate_last(heads: Tensor, tables: Tables, back: bool = False) -> Tensor:
    """[T, heads, D] with its last dimensions rotated in neighbouring pairs, or rotated back."""
    cos, sin = tables
    rest, turned = heads.tensor_split([heads.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    turned = rotary(turned, turned[:, :0], cos, -sin if back else sin, interleaved=True)[0]
    return torch.cat([rest, turned], dim=-1) if rest.shape[-1] else turned
