"""What the layers remember of the tokens so far, for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Room for the tokens of `batch` sequences in every layer. A token's slot is its position in its
    sequence, so sequences of different lengths need no padding.

    A layer's room is whatever its mixer asks for, a tuple of tensors: keys and values [batch, max_length,
    heads, dim], say. A mixer that remembers a state and not tokens reads and writes its tensors itself.

    Args:
        layers: the room of each layer.
        batch: the number of sequences.
        device: that of the room.
    """

    def __init__(self, layers: list[tuple[Tensor, ...]], batch: int, device: torch.device):
        self.layers = layers
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens held, a sequence
        self.longest = 0
        self.extent = 0  # places of a sequence that are looked at: all that hold a token, or more
        self.newest = 0  # how many tokens of a sequence are now being added, at most
        self.rows = torch.empty(
            0, dtype=torch.long, device=device
        )  # of the tokens now being added: their sequence
        self.slots = self.rows  # and their place in it
        # Where images take fewer positions than tokens: by how much further each sequence goes on, and how
        # far beyond its tokens it may at most.
        self.shift: Tensor | None = None
        self.ahead = 0
        # Where layers read features of images: these, and what its last token sees of them; and of each layer
        # what it has made of them.
        self.images: Any = None
        self.of_images: dict[int, tuple[Tensor, ...]] = {}
        self._all_rows = torch.arange(batch, device=device)
        self._seen: dict[tuple[int | None, int | None], Tensor] = {}

    def reserve(self, counts: Tensor, most: int) -> Tensor:
        """Make room for `counts` [batch] more tokens a sequence, `most` being the largest. Returns their
        positions [T].
        """
        self.rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        first_of_row = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        nth = torch.arange(len(self.rows), device=counts.device) - first_of_row
        self.slots = self.lengths[self.rows] + nth
        self.lengths = self.lengths + counts
        self.longest += most
        self.extent, self.newest = self.longest, most
        self._seen.clear()
        return self.slots

    def reserve_next(self, slots: Tensor, extent: int) -> None:
        """Make room for one token of each sequence, at the places `slots` [batch], all of them below
        `extent`. Nothing here depends on what they are: on a GPU it can be recorded and played back.
        `lengths` and `longest` are for the caller to count on.
        """
        self.rows, self.slots, self.extent, self.newest = self._all_rows, slots, extent, 1
        self._seen.clear()

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store what a layer remembers of the new tokens, each [T, ...], and return it of all, each [batch,
        extent, ...].
        """
        room = self.layers[layer]
        for tensor, values in zip(room, new, strict=True):
            tensor[self.rows, self.slots] = values.to(tensor.dtype)
        return tuple(tensor[:, : self.extent] for tensor in room)

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """The states of a recurrent layer behind the tokens before the new ones, each [batch, ...]; None if
        there are none.
        """
        return None if self.longest == self.newest else self.layers[layer]

    def keep_states(self, layer: int, *states: Tensor) -> None:
        """Store the states of a recurrent layer behind the new tokens."""
        for room, state in zip(self.layers[layer], states, strict=True):
            room.copy_(state)

    def real_tokens(self) -> tuple[Tensor, Tensor] | None:
        """Which of the new tokens are not padding, and the bounds [batch + 1] of each row among these; None:
        there is no padding.
        """
        return None

    def sees(self, layer: int, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Which of the tokens that `append` returned each new one sees, [batch, new, extent] bool. None:
        nothing is remembered but the new tokens, and they see one another as documents do. `window` and
        `chunk`: see `AttentionSpec`.
        """
        if self.longest == self.newest:
            return None
        if (window, chunk) not in self._seen:
            place = torch.arange(self.extent, device=self.slots.device)
            sees = place <= self.slots[:, None]
            if window is not None:
                sees &= place > self.slots[:, None] - window
            if chunk is not None:
                sees &= place // chunk == self.slots[:, None] // chunk
            self._seen[window, chunk] = sees[:, None]
        return self._seen[window, chunk]
