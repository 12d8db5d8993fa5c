"""Recurrences h_t = decay_t h_{t-1} + added_t of packed documents in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Bounds(NamedTuple):
    """Documents of a packed row."""

    first: Tensor  # [documents], each document's first token, T for one without tokens
    last: Tensor  # [documents], its last token, T for one without tokens
    begins: Tensor  # [T] bool, the first tokens

    @staticmethod
    def of(cu_seqlens: Tensor | None, x: Tensor) -> Bounds:
        if cu_seqlens is None:
            cu_seqlens = torch.arange(2, device=x.device) * len(x)
        first, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        nothing = torch.full_like(first, len(x))
        opening, last = (torch.where(end > first, token, nothing) for token in (first, end - 1))
        begins = torch.zeros(len(x) + 1, dtype=torch.bool, device=x.device).index_fill(0, opening, True)
        return Bounds(opening, last, begins[:-1])

    def at_starts(self, values: Tensor, otherwise: Tensor) -> Tensor:
        """Values [T, ...] at first tokens, `otherwise` [documents, ...] for a document without tokens."""
        return self._at(self.first, values, otherwise)

    def at_ends(self, values: Tensor, otherwise: Tensor) -> Tensor:
        return self._at(self.last, values, otherwise)

    def _at(self, token: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
        exists = (token < len(values)).view(-1, *[1] * (values.dim() - 1))
        padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return torch.where(exists, padded[token], otherwise)

    def to_starts(self, values: Tensor, tokens: int) -> Tensor:
        """Values [documents, ...] at first tokens, zero elsewhere: [T, ...]."""
        return values.new_zeros(tokens + 1, *values.shape[1:]).index_add(0, self.first, values)[:-1]

    def to_ends(self, values: Tensor, tokens: int) -> Tensor:
        return values.new_zeros(tokens + 1, *values.shape[1:]).index_add(0, self.last, values)[:-1]


def prefix(decay: Tensor, added: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + added_t over the first dimension: token by token in blocks of 16 side by side,
    and so over the blocks.
    """
    tokens, width = len(added), min(16, len(added))
    if tokens < 2:
        return added
    decays, terms = (
        F.pad(values, (0, 0, 0, 0, 0, -tokens % width)).unflatten(0, (-1, width)).unbind(1)
        for values in (decay, added)
    )
    h, reach = [terms[0]], [decays[0]]
    for d, term in zip(decays[1:], terms[1:], strict=True):
        h.append(torch.addcmul(term, d, h[-1]))
        reach.append(d * reach[-1])
    inside = torch.stack(h, 1)
    if len(inside) > 1:
        before = F.pad(prefix(reach[-1], h[-1]), (0, 0, 0, 0, 1, 0))[:-1]
        inside = torch.addcmul(inside, torch.stack(reach, 1), before[:, None])
    return inside.flatten(0, 1)[:tokens]
