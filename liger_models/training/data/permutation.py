"""Pseudorandom permutation of a large range, computed entry by entry instead of stored.

A Feistel network maps (left, right) to (right, left xor f(right, key)) in each round. This is invertible for
any f, so it permutes the numbers of 2 * half bits. Results beyond the range are mapped again until they fall
inside ("cycle walking"), which leaves a permutation of the range (Black and Rogaway, Ciphers with Arbitrary
Finite Domains, 2002).
"""

from __future__ import annotations

import hashlib

from torch import Tensor

ROUNDS = 8
MASK = 0xFFFFFFFF  # products of 32 and 31 bits stay below 2**63


class Permutation:
    """Permutation of range(size) determined by the string `key`, in constant memory."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self.half = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.sha256(key.encode()).digest()
        self.keys = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(ROUNDS)]

    def __call__(self, places: Tensor) -> Tensor:
        """Map positions to numbers, int64 in and out."""
        numbers = self._once(places)
        while (outside := numbers >= self.size).any():
            numbers[outside] = self._once(numbers[outside])
        return numbers

    def _once(self, numbers: Tensor) -> Tensor:
        mask = (1 << self.half) - 1
        left, right = numbers >> self.half, numbers & mask
        for key in self.keys:
            mixed = (right ^ key) * 0x7FEB352D
            mixed = ((mixed ^ (mixed >> 29)) & MASK) * 0x5A7E3B15
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) >> 16 & mask)
        return left << self.half | right
