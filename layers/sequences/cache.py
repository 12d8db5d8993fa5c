"""The key-value cache of generation, which also holds recurrent states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Memory for the tokens of `batch` sequences in every layer. A token's slot is its position in its
    sequence, so sequences of different lengths need no padding.

    A mixer chooses the tensors of its layer, such as keys and values [batch, max_length, heads, dim]. A
    recurrent mixer caches a state instead of tokens (`states`, `keep_states`).

    Args:
        layers: the tensors of each layer's attention; () for a layer without.
        recurrent: the states of each layer's recurrent mixer; () for a layer without.
        batch: the number of sequences.
        device: the device of `lengths`, `rows` and `slots`.

    Attributes:
        lengths: [batch], the number of cached tokens of each sequence.
        longest: the largest of them.
        extent: the number of slots that attention reads: all that hold a token, or more.
        newest: the largest number of tokens that the call adds to a sequence.
        rows, slots: [T], the sequence and the slot of each new token.
        shift: [batch], the difference between positions and slots of the next tokens, if images take fewer
            positions than tokens.
        ahead: the largest value that `shift` may have.
        images: image features, and the tiles that the last token attends to, if layers read image features.
        of_images: the keys and values that each layer has made from these features.
        of_compressed: the compressed keys that each layer has made from its tokens, by name.
    """

    def __init__(
        self,
        layers: list[tuple[Tensor, ...]],
        batch: int,
        device: torch.device,
        recurrent: list[tuple[Tensor, ...]] | None = None,
    ):
        self.layers, self.recurrent = layers, recurrent or []
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = self.extent = self.newest = 0
        self.rows = self.slots = torch.empty(0, dtype=torch.long, device=device)
        self.shift: Tensor | None = None
        self.ahead = 0
        self.images: Any = None
        self.of_images: dict[int, tuple[Tensor, ...]] = {}
        self.of_compressed: dict[int, dict[str, Tensor | None]] = {}
        self._all_rows = torch.arange(batch, device=device)
        self._masks: dict[tuple[int | None, ...], Tensor] = {}

    def reserve(self, counts: Tensor, most: int) -> Tensor:
        """Reserve slots for `counts` [batch] more tokens of each sequence, `most` being the largest count.
        Returns the slots [T].
        """
        self.rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        first_of_row = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        nth = torch.arange(len(self.rows), device=counts.device) - first_of_row
        self.slots = self.lengths[self.rows] + nth
        self.lengths = self.lengths + counts
        self.longest += most
        self.extent, self.newest = self.longest, most
        self._masks.clear()
        return self.slots

    def reserve_next(self, slots: Tensor, extent: int) -> None:
        """Reserve `slots` [batch], all below `extent`, for one token of each sequence. Nothing here depends
        on their values, so a CUDA graph can capture it. The caller updates `lengths` and `longest`.
        """
        self.rows, self.slots, self.extent, self.newest = self._all_rows, slots, extent, 1
        self._masks.clear()

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store a layer's tensors of the new tokens, [T, ...] each, and return those of all tokens, [batch,
        extent, ...] each.
        """
        kept = self.layers[layer]
        for tensor, values in zip(kept, new, strict=True):
            tensor[self.rows, self.slots] = values.to(tensor.dtype)
        return tuple(tensor[:, : self.extent] for tensor in kept)

    def append_compressed(self, layer: int, keys: Tensor, *projected: Tensor) -> tuple[Tensor, ...]:
        """`append` of keys [T, D] that are the values, too, and of what compressors read, [T, ...]."""
        return self.append(layer, keys, *projected)

    def compressed_keys(self, layer: int) -> dict[str, Tensor | None]:
        """The compressed keys of a layer by name, [batch, W or more, dim], to which it adds."""
        return self.of_compressed.setdefault(layer, {})

    def places(self) -> tuple[Tensor, Tensor]:
        """The number of each new token in its sequence [batch, new], and the slot of each sequence's first
        token [batch], where all sequences have as many new tokens.
        """
        slots = self.slots.unflatten(0, (len(self.lengths), -1))
        return slots, torch.zeros_like(slots[:, 0])

    def states(self, layer: int, first: int = 0) -> tuple[Tensor, ...] | None:
        """The states of a recurrent layer before the new tokens, [batch, ...] each, from the `first` on; None
        if the new tokens are the first.
        """
        return None if self.longest == self.newest else self.recurrent[layer][first:]

    def keep_states(self, layer: int, *states: Tensor, first: int = 0) -> None:
        """Store the states of a recurrent layer after the new tokens, from the `first` on."""
        for room, state in zip(self.recurrent[layer][first : first + len(states)], states, strict=True):
            room.copy_(state)

    def inputs(self, layer: int, first: int, count: int = 1) -> tuple[Tensor, ...] | None:
        """The last inputs of a layer's convolutions before the new tokens, [batch, K - 1, channels] each, of
        `count` convolutions from number `first` on; None if the new tokens are the first.
        """
        found = self.states(layer, first)
        return None if found is None else found[:count]

    def keep_inputs(self, layer: int, first: int, *inputs: Tensor) -> None:
        """Store the last inputs of convolutions after the new tokens, from number `first` on."""
        self.keep_states(layer, *inputs, first=first)

    def distances(self, layer: int) -> Tensor:
        """The number of tokens from each token returned by `append` to each new one, [batch, new, extent]."""
        return (self.slots[:, None] - torch.arange(self.extent, device=self.slots.device))[:, None]

    def real_tokens(self) -> tuple[Tensor, Tensor] | None:
        """The indices of the new tokens that are not padding, and the boundaries [batch + 1] of the rows
        among these; None if there is no padding.
        """
        return None

    def mask(self, layer: int, window: int | None, chunk: int | None = None) -> Tensor | None:
        """The tokens returned by `append` that each new token attends to, [batch, new, extent] bool. None if
        the cache holds only the new tokens, which attend to one another as documents. `window` and `chunk`:
        see `AttentionSpec`.
        """
        if self.longest == self.newest:
            return None
        if (window, chunk) not in self._masks:
            slot = torch.arange(self.extent, device=self.slots.device)
            mask = slot <= self.slots[:, None]
            if window is not None:
                mask &= slot > self.slots[:, None] - window
            if chunk is not None:
                mask &= slot // chunk == self.slots[:, None] // chunk
            self._masks[window, chunk] = mask[:, None]
        return self._masks[window, chunk]
