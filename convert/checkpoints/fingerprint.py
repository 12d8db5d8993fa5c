"""Fingerprints of tensors: which of them have changed, without a second copy of their bits.

A tensor's bytes are read as 32-bit words x in chunks of 16 MiB. Each chunk has two multilinear hashes

    sum_i r_i x_i  mod 2^64,   r fixed pseudo-random 64-bit numbers

(Lemire and Kaser, 2014, "Strongly universal string hashing is fast", arXiv:1202.4961): two different chunks
share one with probability 2^-33 at most, and both with 2^-66.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

_WORDS = 1 << 22  # words of a chunk


def fingerprints(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Fingerprint each tensor, of any dtype and strides: int64 [chunks, 2] on its device."""
    tables: dict[torch.device, Tensor] = {}
    found = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        pieces = flat.split(4 * _WORDS // flat.element_size())
        words = min(_WORDS, -(-flat.numel() * flat.element_size() // 4))
        table = tables.get(flat.device)
        if table is None or table.shape[1] < words:
            table = tables[flat.device] = _multipliers(words, flat.device)
        found.append(torch.stack([_hashes(piece, table) for piece in pieces]))
    return found


def _hashes(piece: Tensor, table: Tensor) -> Tensor:
    data = piece.view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = F.pad(data, (0, -data.numel() % 4)).clone()
    words = data.view(torch.int32).long()
    return torch.stack([(words * row[: len(words)]).sum() for row in table])  # sums wrap around


def _multipliers(words: int, device: torch.device) -> Tensor:
    """[2, words] numbers of the generator SplitMix64 (Steele et al., 2014), the same on every device."""
    z = torch.arange(1, 2 * words + 1, device=device).view(words, 2).t() * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: torch's own shift repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
