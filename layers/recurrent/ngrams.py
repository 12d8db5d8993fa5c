"""Embeddings of n-grams, added to residual streams (Qwen4, 2026).

    e_t = concat over n from 2 to N, and heads h, of table[hash_nh(id_t, .. id_t-n+1)]
    k_j = norm(W_k e)_j,   a_j = k_j . norm(X_j) / sqrt(H),   v_j = sigmoid(sign(a_j) sqrt(|a_j|)) W_v e
    X'_j = X_j + v_j + silu(conv(norm(v))_j)                            for each stream X_j of H elements

    hash_nh = (id_t m_0 xor id_t-1 m_1 .. xor id_t-n+1 m_n-1) mod p_nh + offset_nh      in 64 bits

Ids before the start of a document count as `eos`, and so do all before an `eos`. The taps of the convolution
lie N tokens apart, so a document is N convolutions, one of every N-th token: their tokens are brought
together, and are documents of kernels/recurrent/short_conv.py. For the backward pass the products' results
are kept, and all else is made again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.kernels import conv_state, embedding, short_conv
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.parts.gated_streams import StreamNorm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe, recompute
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedStreamsSpec, NgramSpec, NormSpec

STATES = 2  # of the layer's own mixer, before those of this part in a cache


class NgramInput(nn.Module):
    """Embeddings of n-grams for the streams of one layer.

    Args:
        hidden_size: the width H of a stream.
        streams: their number.
        spec: the n-grams.
        norm: of keys, streams and values.
        layer: the index of the layer in the model, and in a cache.
    """

    def __init__(
        self, hidden_size: int, streams: GatedStreamsSpec, spec: NgramSpec, norm: NormSpec, layer: int = 0
    ):
        super().__init__()
        self.hidden_size, self.count, self.spec, self.layer = hidden_size, streams.count, spec, layer
        wide = streams.count * hidden_size
        self.ple_embedding = NgramEmbedding(spec)
        self.key_proj = Linear(spec.width, wide, bias=False)
        self.value_proj = Linear(spec.width, hidden_size, bias=False)
        norms = (StreamNorm(hidden_size, streams.count, norm) for _ in range(3))
        self.norm_key, self.norm_query, self.norm_conv = norms
        self.conv1d = SpacedConvolution(wide, spec.conv, spec.size)

    def forward(self, streams: Tensor, ids: Tensor, sequences: Sequences) -> Tensor:
        """streams [T, n H], ids [T] -> [T, n H]."""
        sequences = sequences.on(streams.device)
        documents, cache, ids = sequences.documents, sequences.cache, ids.to(streams.device).long()
        if cache is not None:
            return streams + self._continued(streams, ids, documents, cache)
        first = _firsts(documents)
        key, value = self._projected(self.ple_embedding(ids, first))
        order = documents._once(("every", self.spec.size), lambda: _every(documents, self.spec.size))
        added: Tensor = recompute(self._added, streams, key, value, *order)
        return streams + added

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, n H] and values [T, H] before their norms."""
        return self.key_proj(rows), self.value_proj(rows)

    def _added(self, streams: Tensor, key: Tensor, value: Tensor, *order: Tensor) -> Tensor:
        gated = self._gated(streams, key, value)
        return gated + self.conv1d(self.norm_conv(gated), *order)

    def _gated(self, streams: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The gated values, [T, n H]."""
        pairs = (at_least_float32(x) for x in (self.norm_key(key), self.norm_query(streams)))
        keys, queries = (x.unflatten(-1, (self.count, -1)) for x in pairs)
        score = (keys * queries).sum(-1) / math.sqrt(self.hidden_size)  # [T, n]
        wide = gates_of(score)[..., None] * at_least_float32(value)[:, None]
        return wide.flatten(1).to(value.dtype)

    def _continued(self, streams: Tensor, ids: Tensor, documents: Documents, cache: Any) -> Tensor:
        """The additions to the streams of new tokens, whose documents are the rows of a cache."""
        before = cache.states(self.layer, STATES)
        rows, real = documents.boundaries(), cache.real_tokens()
        if real is None:
            added, after = self._with_states(streams, ids, rows, before)
        else:
            tokens, rows = real
            own, after = self._with_states(streams[tokens], ids[tokens], rows, before)
            added = torch.zeros_like(streams).index_copy(0, tokens, own)
        cache.keep_states(self.layer, *after, first=STATES)
        return added

    def _with_states(
        self, streams: Tensor, ids: Tensor, rows: Tensor, before: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, rows = len(rows) - 1, rows.long()
        if before is None:
            inputs = streams.new_zeros(batch, self.conv1d.before, streams.shape[1])
            context = ids.new_full((batch, self.spec.size - 1), self.spec.eos)
        else:
            inputs, context = before[0], before[1].long()
        row = torch.repeat_interleave(
            torch.arange(batch, device=rows.device), rows.diff(), output_size=len(ids)
        )
        first = rows[row]
        key, value = self._projected(self.ple_embedding(ids, first, context[row]))
        gated = self._gated(streams, key, value)
        normed = self.norm_conv(gated)
        added = gated + self.conv1d.continued(normed, first, row, inputs)
        inputs = conv_state(normed, rows, self.conv1d.before + 1, inputs)
        context = conv_state(ids[:, None], rows, self.spec.size, context[..., None])[..., 0]
        return added, (inputs, context)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the convolution's last inputs [batch, taps before a token, n H], and the last ids."""
        wide = self.count * self.hidden_size
        inputs = torch.zeros(batch, self.conv1d.before, wide, device=device, dtype=dtype)
        return inputs, torch.zeros(batch, self.spec.size - 1, device=device, dtype=torch.long)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token: the streams, keys and values before their norms, and the rows of the table by
        number, or with `all` themselves, too.
        """
        spec = self.spec
        kept = 2 * self.count * self.hidden_size + self.hidden_size + (spec.width if level == "all" else 0)
        return itemsize * kept + 8 * len(spec.table_sizes)

    def extra_repr(self) -> str:
        return f"n-grams up to {self.spec.size}, heads={self.spec.heads}"


class NgramEmbedding(nn.Module):
    """The hashes of n-grams, and the table that they number rows of.

    Args:
        spec: of the n-grams.
    """

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, spec: NgramSpec):
        super().__init__()
        self.spec = spec
        for name, values in self._constants().items():
            self.register_buffer(name, torch.tensor(values))
        self.ngram_embedding = NgramTable(spec.rows, spec.width // len(spec.table_sizes), spec.pieces)

    def _constants(self) -> dict[str, list[int]]:
        sizes = self.spec.table_sizes
        return {
            "layer_multipliers": [*self.spec.factors],
            "ngram_heads_vocab_sizes": [*sizes],
            "ngram_heads_offsets": [sum(sizes[:n]) for n in range(len(sizes))],
        }

    def reset_parameters(self, *_: object) -> None:
        """Set the constants of the hashes; the table is a module of its own."""
        with torch.no_grad():
            for name, values in self._constants().items():
                self.get_buffer(name).copy_(torch.tensor(values))

    def forward(self, ids: Tensor, first: Tensor, context: Tensor | None = None) -> Tensor:
        """The embeddings [T, width].

        Args:
            ids: [T] int64.
            first: [T], the first token of each token's document.
            context: [T, size - 1], the ids before each token's document. Default: `eos`.
        """
        embedded: Tensor = self.ngram_embedding(self._rows(ids, first, context))
        return embedded

    @torch.no_grad()
    def _rows(self, ids: Tensor, first: Tensor, context: Tensor | None) -> Tensor:
        """Numbers of rows, [T, tables]."""
        spec, token = self.spec, torch.arange(len(ids), device=ids.device)
        mixed, rows = ids * self.layer_multipliers[0], []
        ended = torch.zeros_like(ids, dtype=torch.bool)
        for back in range(1, spec.size):
            place = token - back
            earlier = torch.full_like(ids, spec.eos)
            if context is not None:
                missing = (place - first + spec.size - 1).clamp(0, spec.size - 2)
                earlier = context.gather(1, missing[:, None])[:, 0]
            before = torch.where(place >= first, ids[place.clamp(min=0)], earlier)
            ended = ended | (before == spec.eos)
            before = before.masked_fill(ended, spec.eos)
            mixed = mixed ^ (before * self.layer_multipliers[back])
            own = slice((back - 1) * spec.heads, back * spec.heads)
            sizes, offsets = self.ngram_heads_vocab_sizes[own], self.ngram_heads_offsets[own]
            rows.append(mixed[:, None].remainder(sizes) + offsets)
        return torch.cat(rows, 1)


class NgramTable(nn.Module):
    """A table of embeddings, which checkpoints may hold in pieces.

    Not an `nn.Embedding`, which tools would take for a table of tokens.

    Args:
        rows, width: of the table.
        pieces: number of pieces of equal height.
    """

    def __init__(self, rows: int, width: int, pieces: int):
        super().__init__()
        self.pieces = pieces
        self.weight = nn.Parameter(torch.empty(rows, width))

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the rows from a normal distribution."""
        nn.init.normal_(self.weight, 0.0, std, generator)

    def canonical_form(self, path: str, name: str) -> Expr:
        """The pieces, one after another."""
        rows, width = self.weight.shape
        height = rows // self.pieces
        return Cat(tuple(Ref(f"{path}.shard_{n}.{name}", (height, width)) for n in range(self.pieces)))

    def forward(self, rows: Tensor) -> Tensor:
        """rows [T, n] -> [T, n width]."""
        return carry_recipe(_looked_up(rows, self.weight), _looked_up, rows, self.weight, late=True)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}"


class SpacedConvolution(ShortConvolution):
    """Causal depthwise convolution with taps that lie apart, and a SiLU.

    Args:
        channels: the width C.
        width: number of taps K.
        spacing: tokens from tap to tap.

    Attributes:
        before: number of tokens before a token that its taps reach.
    """

    def __init__(self, channels: int, width: int, spacing: int):
        super().__init__(((1, channels),), width)
        self.spacing, self.before = spacing, (width - 1) * spacing

    def forward(  # type: ignore[override]
        self, x: Tensor, order: Tensor, target: Tensor, bounds: Tensor
    ) -> Any:
        """x [T, C] -> [T, C], with what `_every` returns."""
        together = _Ordered.apply(x, order, target)
        y = short_conv(together, self.weight, activation="silu", bounds=bounds)
        return _Ordered.apply(y, target, order)

    def continued(self, x: Tensor, first: Tensor, row: Tensor, state: Tensor) -> Tensor:
        """x [T, C] of documents that begin at `first` [T] and continue `state` [n, before, C], of whose rows
        `row` [T] is each token's.
        """
        token, wide = torch.arange(len(x), device=x.device), at_least_float32(self.weight)
        total: Any = 0.0
        for tap in range(wide.shape[1]):
            place = token - (wide.shape[1] - 1 - tap) * self.spacing
            earlier = state[row, (place - first + self.before).clamp(0, self.before - 1)]
            inputs = torch.where((place >= first)[:, None], x[place.clamp(min=0)], earlier.to(x.dtype))
            total = total + at_least_float32(inputs) * wide[:, tap]
        return torch.nn.functional.silu(total).to(x.dtype)


class _Ordered(torch.autograd.Function):
    """Rows in another order, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return dy.index_select(0, back), None, None


def gates_of(scores: Tensor) -> Tensor:
    """sigmoid(sign(a) sqrt(|a|)) of scores a, without the infinite slope at zero."""
    return (scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).sigmoid()


def _looked_up(rows: Tensor, weight: Tensor) -> Tensor:
    return embedding(rows, weight).flatten(1)


def _firsts(documents: Documents) -> Tensor:
    """The first token of each token's document, [T] int64."""
    bounds = documents.bounds()
    if bounds is None:
        return torch.zeros(documents.num_tokens, dtype=torch.long, device=documents.device)
    return bounds[0].long()


def _every(documents: Documents, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of each document brought together whose places differ by multiples of `step`: the token at each
    place, the place of each token, and bounds of what was brought together, as `document_bounds` gives them.
    """
    bounds, total = documents.bounds(), documents.num_tokens
    token = torch.arange(total, device=documents.device)
    first, end = (torch.zeros_like(token), total) if bounds is None else bounds.long()
    length, place = end - first, token - first
    nth = place % step
    start = first + nth * (length // step) + torch.minimum(nth, length % step)
    target = start + place // step
    order = torch.empty_like(token).index_copy(0, target, token)
    ends = start + (length - nth + step - 1) // step
    return order, target, torch.stack([start, ends]).index_select(1, order).int()
