"""Adapter from transformers' caches (dynamic, static, sliding, quantised ...) to our cache interface.

State of images for later calls is kept as an attribute of the transformers cache: the offset of positions
from the number of tokens, and the features that layers computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from liger_models.convert.errors import DataError
from liger_models.layers.attention.cross_attention import VisibleTiles
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.documents import Documents

# transformers 5.24 renamed it, in calls and outputs, and takes the older names with a warning.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def knows_positions(cache: Cache | None) -> bool:
    """Return whether the cache has a position offset, from images that take fewer positions than tokens."""
    _, shift, *_ = getattr(cache, "of_images", None) or (0, None)
    return shift is not None


def given_cache(past_key_values: Cache | None, others: dict[str, Any]) -> Cache | None:
    """Return the cache of a call, which transformers passes as `cache` since 5.24, and to Mamba's models
    as `cache_params` before.

    Raises:
        ValueError: two caches are given.
    """
    named = {"past_key_values": past_key_values}
    named |= {name: others.pop(name) for name in ("cache", "cache_params") if name in others}
    given = {name: cache for name, cache in named.items() if cache is not None}
    if len({id(cache) for cache in given.values()}) > 1:  # `generate` may pass one under two names
        raise ValueError(f"found two caches, {' and '.join(given)}; pass one")
    return next(iter(given.values()), None)


def tokens_in(cache: Cache) -> int:
    """Return the number of tokens that filled a cache.

    Raises:
        DataError: it holds only states, and another model filled it.
    """
    if not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return int(cache.get_seq_length())
    if not cache.has_previous_state():
        return 0
    tokens = getattr(cache, "tokens_so_far", None)  # states do not tell
    if tokens is None:
        raise DataError("the cache was filled by another model; pass the whole text and a new cache")
    return int(tokens)


class UnfilledCache(Cache):
    """Placeholder that a training step returns when only the config requested a cache.

    Without it, a decoding loop that passes `past_key_values` on would silently attend to its last token only.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Raise DataError: the cache was never filled."""
        raise DataError(
            "this cache is from a training step, which fills a cache only on request: call the model with "
            "use_cache=True, in evaluation mode (model.eval()), or without labels"
        )

    update = get_mask_sizes = get_seq_length  # type: ignore[assignment]


class TransformersCache(KVCache):
    """View of a transformers cache for one call. The cache stores a batch as [batch, seq], padding included.

    Args:
        cache: of transformers.
        documents: the tokens of this call. The first call's documents have no padding; later calls include
            all tokens.
        attention_mask: [batch, all tokens so far], 0 at padding, or None.
    """

    def __init__(self, cache: Cache, documents: Documents, attention_mask: Tensor | None):
        shape, device = documents.shape, documents.device
        super().__init__([], shape[0], device)
        self.cache, self.documents, self.attention_mask = cache, documents, attention_mask
        self.shape = shape
        self.seen = tokens_in(cache)
        self.longest, self.newest = self.seen + shape[1], shape[1]
        self._extent: dict[int, tuple[int, int]] = {}  # layer -> (number of tokens returned, first one)
        self._real: tuple[Tensor, Tensor] | None = None
        rows = torch.arange(shape[0], device=device)[:, None].expand(shape)
        self.rows = documents.pack(rows)
        self.lengths = torch.zeros_like(self.lengths).index_add(0, self.rows, torch.ones_like(self.rows))
        if self.seen:
            self._recall()

    def keep(self) -> None:
        """Store on the cache what later calls need: the number of its tokens, and the state of images."""
        kept: Any = self.cache
        kept.tokens_so_far = self.longest
        if self.seen == 0:
            before = None if self.shift is None else self.shift + self.lengths - self.shape[1]  # of slots
            kept.of_images = (self.shape[0], before, self.ahead, self.images, self.of_images)

    def _recall(self) -> None:
        batch, self.shift, self.ahead, self.images, self.of_images = getattr(
            self.cache, "of_images", (self.shape[0], None, 0, None, {})
        )
        if batch != self.shape[0] and (self.shift is not None or self.images is not None):
            raise DataError(
                f"the cache was filled with the images of {batch} rows, and this call has {self.shape[0]}"
            )
        if self.images is not None:
            images, tiles = self.images
            new = self.shape[1]
            each = (x.repeat_interleave(new, 0) for x in (tiles.any, tiles.shown))
            self.images = images, VisibleTiles(tiles.mask.expand(-1, new, -1), *each)

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store a layer's tensors for the new tokens, each [T, ...], and return those of all cached tokens,
        each [batch, cached tokens, ...]. A third tensor, or a single one, holds the keys of an indexer, and a
        fourth their positions.
        """
        if len(new) == 1:  # keys and values are those of another layer
            return (self._append_index(layer, self.documents.unpack(new[0])),)
        keys_and_values, index, positions = new[:2], new[2:3], new[3:]
        self._extent[layer] = self.cache.get_mask_sizes(self.shape[1], layer)
        flat = [tensor.dim() == 2 for tensor in keys_and_values]  # add a head axis
        heads = [x[:, None] if alone else x for x, alone in zip(keys_and_values, flat, strict=True)]
        cache: Any = self.cache
        kept = cache.update(*(self.documents.unpack(x).transpose(1, 2) for x in heads), layer)
        rows = [x.transpose(1, 2) for x in kept]
        rows = [x[:, :, 0] if alone else x for x, alone in zip(rows, flat, strict=True)]
        rows += [self._append_index(layer, self.documents.unpack(keys)) for keys in index]
        return (*rows, *(self._append_positions(layer, self.documents.unpack(ids)) for ids in positions))

    def _append_index(self, layer: int, keys: Tensor) -> Tensor:
        """Store an indexer's keys [batch, new, head_dim] and return those of all cached tokens."""
        kept: Any = self.cache.layers[layer]
        if hasattr(kept, "update_index"):  # of MiniMax-M3, with an axis of heads
            return kept.update_index(keys[:, None])[:, 0]
        return kept.update_indexer(keys)

    def _append_positions(self, layer: int, positions: Tensor) -> Tensor:
        """Store the positions [batch, new, axes] of an indexer's keys where transformers' own model keeps
        them, and return those of all cached tokens; 0 in slots without one.
        """
        kept: Any = self.cache.layers[layer]
        new = positions.permute(2, 0, 1)
        before = getattr(kept, "indexer_position_ids", None)  # since transformers 5.21
        if before is not None:
            new = torch.cat([before[..., : self.seen], new], dim=2)  # a cache may have been cropped
        kept.indexer_position_ids = new
        rows = new.permute(1, 2, 0)
        return F.pad(rows, (0, 0, 0, kept.indexer_keys.shape[1] - rows.shape[1]))

    def append_compressed(self, layer: int, keys: Tensor, *projected: Tensor) -> tuple[Tensor, ...]:
        """Store keys [T, D] and what compressors read of the new tokens, [T, ...], the latter where the
        reference's cache has what it reads of the last ones.

        Raises:
            DataError: a cache that was not made for this model.
        """
        cache: Any = self.cache
        self._extent[layer] = cache.get_mask_sizes(self.shape[1], layer)
        new = self.documents.unpack(keys)[:, None]
        kept = [cache.update(new, new, layer)[0][:, 0]]
        held = cache.layers[layer]
        for name, part in zip(("compressor", "indexer"), projected, strict=False):
            if name not in getattr(held, "buffer_kv", ()):
                raise DataError(
                    f"layer {layer} attends to compressed keys, and the cache has a {type(held).__name__}; "
                    "make it for this model: DynamicCache(config=model.config)"
                )
            rows, before = self.documents.unpack(part), held.buffer_kv[name]
            held.buffer_kv[name] = rows if before is None else torch.cat([before, rows], 1)
            kept.append(held.buffer_kv[name])
        return tuple(kept)

    def compressed_keys(self, layer: int) -> dict[str, Tensor | None]:
        """Return `KVCache.compressed_keys`, which is the cache's own."""
        cache: Any = self.cache
        room: dict[str, Tensor | None] = cache.layers[layer].compressed_kv
        return room

    def places(self) -> tuple[Tensor, Tensor]:
        """Return `KVCache.places`."""
        first = torch.zeros_like(self.lengths)
        if self.attention_mask is not None:
            first = self._padding_before()[:, 0, 0].to(first)
        slots = self.seen + torch.arange(self.shape[1], device=first.device)
        return slots - first[:, None], first

    def states(self, layer: int, first: int = 0) -> tuple[Tensor, ...] | None:
        """Return the convolution's last inputs [batch, width - 1, channels], and the recurrent state if there
        is one; from the `first` on, those of n-grams.
        """
        if self.seen == 0:
            return None
        held: Any = self.cache.layers[layer]
        if getattr(held, "conv_states", None) is None:
            raise DataError(
                f"layer {layer} is recurrent, and the cache holds {self.seen} tokens without its state (a "
                f"{type(held).__name__}): fill the cache with this model. PEFT's prefix tuning, which makes "
                "keys and values alone, does not work with recurrent layers; prompt tuning does"
            )
        if first:
            return held.conv_states[1].transpose(1, 2), held.conv_states[2]
        both = held.conv_states, held.recurrent_states
        conv, state = (x[0] if isinstance(x, dict) else x for x in both)  # older transformers have no dict
        return (conv.transpose(1, 2),) if state is None else (conv.transpose(1, 2), state)

    def keep_states(self, layer: int, *states: Tensor, first: int = 0) -> None:
        """Store the states where transformers' own model keeps them; the convolution's is always complete."""
        cache: Any = self.cache
        conv, *scanned = states
        held = cache.layers[layer] if layer < len(cache.layers) else None
        if isinstance(held, CacheLayerMixin) and not isinstance(held, LinearAttentionCacheLayerMixin):
            # Configs of RecurrentGemma do not say in transformers 5.17 which layers are recurrent: the states
            # of its own model are in its modules.
            cache.layers[layer] = LinearAttentionLayer()
        if first:
            cache.update_conv_state(conv.transpose(1, 2), layer, state_idx=1)
            cache.update_conv_state(scanned[0], layer, state_idx=2)
            return
        cache.update_conv_state(conv.transpose(1, 2), layer)
        for state in scanned:
            cache.update_recurrent_state(state, layer)

    def inputs(self, layer: int, first: int, count: int = 1) -> tuple[Tensor, ...] | None:
        """Return `KVCache.inputs`."""
        if self.seen == 0:
            return None
        held: Any = self.cache.layers[layer]
        return tuple(held.conv_states[first + i].transpose(1, 2) for i in range(count))

    def keep_inputs(self, layer: int, first: int, *inputs: Tensor) -> None:
        """Store the inputs where transformers' own model keeps them."""
        cache: Any = self.cache
        for number, last in enumerate(inputs, first):
            cache.update_conv_state(last.transpose(1, 2), layer, state_idx=number)

    def distances(self, layer: int) -> Tensor:
        """Return `KVCache.distances`, the same for all rows."""
        length, start = self._extent[layer]
        keys = start + torch.arange(length, device=self.lengths.device)
        queries = self.seen + torch.arange(self.shape[1], device=keys.device)
        return (queries[:, None] - keys)[None]

    def real_tokens(self) -> tuple[Tensor, Tensor] | None:
        """Return `KVCache.real_tokens`. Calls after the first include padding."""
        if self.seen == 0 or self.attention_mask is None:
            return None
        if self._real is None:
            mask = self.attention_mask[:, self.seen : self.longest].bool()
            counts = mask.sum(1, dtype=torch.int32)
            bounds = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            self._real = mask.flatten().nonzero()[:, 0], bounds
        return None if len(self._real[0]) == len(self.rows) else self._real

    def mask(self, layer: int, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Return `KVCache.mask`. Padding attends only to itself, since every query needs a key, and no other
        token attends to it.
        """
        if self.seen == 0:
            return None
        length, start = self._extent[layer]
        key = (length, start, window, chunk)
        if key not in self._masks:
            self._masks[key] = self._visible(*key)
        return self._masks[key]

    def _visible(self, length: int, start: int, window: int | None, chunk: int | None) -> Tensor:
        keys = start + torch.arange(length, device=self.lengths.device)
        queries = self.seen + torch.arange(self.shape[1], device=keys.device)[:, None]
        mask = keys <= queries
        if window is not None:
            mask = mask & (keys > queries - window)
        mask = mask.expand(self.shape[0], -1, -1)
        if chunk is not None:  # chunks are counted from the first token, not from the padding before it
            first = 0 if self.attention_mask is None else self._padding_before()
            mask = mask & ((keys - first) // chunk == (queries - first) // chunk)
        if self.attention_mask is not None:
            held = torch.zeros(self.shape[0], start + length, dtype=torch.bool, device=keys.device)
            width = min(self.attention_mask.shape[1], start + length)
            held[:, :width] = self.attention_mask[:, :width].bool()
            mask = mask & held[:, None, start:] | (keys == queries)
        return mask

    def _padding_before(self) -> Tensor:
        """Number of padding positions before the first token of each row, [batch, 1, 1]."""
        assert self.attention_mask is not None
        return (self.attention_mask.cumsum(1) == 0).sum(1)[:, None, None]
