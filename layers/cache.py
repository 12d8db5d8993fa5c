"""Keys and values of the tokens so far, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Room for `max_length` tokens of `batch` sequences in every layer. A token's slot is its position in its
    sequence, so sequences of different lengths need no padding.

    Args:
        kv_heads_and_dims: (num_key_value_heads, head_dim) of each layer.
        batch, max_length: sequences, and tokens of the longest.
        device, dtype: of the keys and values.
    """

    def __init__(
        self,
        kv_heads_and_dims: list[tuple[int, int]],
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        def room(heads: int, dim: int) -> Tensor:
            return torch.zeros(batch, max_length, heads, dim, device=device, dtype=dtype)

        self.layers = [(room(*size), room(*size)) for size in kv_heads_and_dims]
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens held, a sequence
        self.longest = 0
        self.rows = torch.empty(
            0, dtype=torch.long, device=device
        )  # of the tokens now being added: their sequence
        self.slots = self.rows  # and their place in it

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
        return self.slots

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' k, v [T, heads, dim] and return all, [batch, longest, heads, dim]."""
        keys, values = self.layers[layer]
        keys[self.rows, self.slots] = k
        values[self.rows, self.slots] = v
        return keys[:, : self.longest], values[:, : self.longest]
