"""Random bits for rounding: Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers").

A counter-based generator: the bits of an element are a function of

    the seed (the key), the step, the parameter's index in the optimizer, the element's index in the parameter

and of nothing else, so that a resumed run, every rank and every division into shards draw the same. Philox
gives four words of 32 bits at once. Elements come in blocks of 4096, whose quarters of 1024 take one of the
four words each: a kernel then meets every word where it needs it.

    counter(e) = (block * 1024 + e mod 1024, its upper half, step, index),    block = e div 4096
    word(e)    = e div 1024 mod 4
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import jit, tl

QUARTER = 1024
BLOCK = 4 * QUARTER

_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def random_bits(seed: int, step: Tensor, index: int, first: int, count: int) -> Tensor:
    """The words of elements first to first + count: int64 [count], each from 0 to 2^32 - 1.

    `step` is a tensor without dimensions, on whose device the bits are drawn.
    """
    start, stop = first // BLOCK, -(-(first + count) // BLOCK)
    counter = torch.arange(start * QUARTER, stop * QUARTER, device=step.device)
    words = philox(seed, counter & _LOW, counter >> 32, step.to(torch.int64), torch.tensor(index))
    by_block = torch.stack([word.expand_as(counter).view(-1, QUARTER) for word in words], 1)
    return by_block.reshape(-1)[first - start * BLOCK :][:count]


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four int64 tensors of words of 32 bits: four such words."""
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(_FACTORS[0], c0), _product(_FACTORS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEYS[0] & _LOW, k1 + _KEYS[1] & _LOW
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower word of a * b, which int64 does not hold: the upper one comes from halves of b."""
    upper = (a * (b & 0xFFFF) >> 16).add_(a * (b >> 16))
    return upper.bitwise_right_shift_(16), (a * b).bitwise_and_(_LOW)


@jit
def block_of_bits(seed, step, index, block, lanes, QUARTER: tl.constexpr):
    """Four uint32 [QUARTER], one for each quarter of a block; `lanes` holds 0 to QUARTER - 1."""
    lanes = lanes.to(tl.uint32)
    counter = block * QUARTER
    low = lanes + counter.to(tl.uint32)
    zero = lanes * 0
    high = zero + (counter >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, zero + step.to(tl.uint32), zero + index.to(tl.uint32))
