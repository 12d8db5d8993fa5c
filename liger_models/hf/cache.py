"""transformers' caches (dynamic, static, sliding, quantised ...), as our layers use a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from liger_models.layers.cache import KVCache


class TransformersCache(KVCache):
    """One call's view of a cache of transformers, in which a batch keeps its shape [batch, seq], padding too.

    Args:
        cache: theirs.
        shape: (batch, new) of the tokens of this call.
        attention_mask: [batch, all tokens so far], 0 at padding, or None.
        device: that of the tokens.
    """

    def __init__(
        self, cache: Cache, shape: tuple[int, int], attention_mask: Tensor | None, device: torch.device
    ):
        super().__init__([], shape[0], device)
        self.cache, self.shape, self.attention_mask = cache, shape, attention_mask
        self.seen = int(cache.get_seq_length())
        self.longest, self.newest = self.seen + shape[1], shape[1]
        self._extent: dict[int, tuple[int, int]] = {}  # of a layer: how many tokens it returns, from which on
        self._masks: dict[tuple[int | None, ...], Tensor] = {}

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store what a layer remembers of the new tokens, each [T, ...], and return it of all, each [batch,
        those that are kept, ...].
        """
        self._extent[layer] = self.cache.get_mask_sizes(self.shape[1], layer)
        flat = [tensor.dim() == 2 for tensor in new]  # what has no heads gets one
        heads = [tensor[:, None] if alone else tensor for tensor, alone in zip(new, flat, strict=True)]
        kept = self.cache.update(*(x.unflatten(0, self.shape).transpose(1, 2) for x in heads), layer)
        rows = [x.transpose(1, 2) for x in kept]
        return tuple(x[:, :, 0] if alone else x for x, alone in zip(rows, flat, strict=True))

    def sees(self, layer: int, window: int | None, chunk: int | None = None) -> Tensor | None:
        """As `KVCache.sees`. Padding is seen by none but itself: no query may see nothing."""
        length, start = self._extent[layer]
        if self.seen == 0 and self.attention_mask is None:
            return None
        key = (length, start, window, chunk)
        if key not in self._masks:
            self._masks[key] = self._visible(*key)
        return self._masks[key]

    def _visible(self, length: int, start: int, window: int | None, chunk: int | None) -> Tensor:
        keys = start + torch.arange(length, device=self.lengths.device)
        queries = self.seen + torch.arange(self.shape[1], device=keys.device)[:, None]
        sees = keys <= queries
        if window is not None:
            sees = sees & (keys > queries - window)
        sees = sees.expand(self.shape[0], -1, -1)
        if chunk is not None:  # which are counted from the first token, not from the padding before it
            first = 0 if self.attention_mask is None else self._padding_before()
            sees = sees & ((keys - first) // chunk == (queries - first) // chunk)
        if self.attention_mask is not None:
            held = torch.zeros(self.shape[0], start + length, dtype=torch.bool, device=keys.device)
            width = min(self.attention_mask.shape[1], start + length)
            held[:, :width] = self.attention_mask[:, :width].bool()
            sees = sees & held[:, None, start:] | (keys == queries)
        return sees

    def _padding_before(self) -> Tensor:
        """How many places of each row lie before its first token, [batch, 1, 1]."""
        assert self.attention_mask is not None
        return (self.attention_mask.cumsum(1) == 0).sum(1)[:, None, None]
