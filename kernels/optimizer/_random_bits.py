"""Random bits for rounding, a function of only

    the seed, the step, the parameter's index in the optimizer, the element's index in the parameter

so that a resumed run, every rank and every sharding draw the same. They come from Philox4x32-10 (Salmon et
al., 2011, "Parallel random numbers"), a counter-based generator keyed by the seed, through two tables: PERIOD
words for the elements of a period, and one word for each period of the parameter.

    x(e) = table[e mod PERIOD] ^ periods[e div PERIOD]

This is simple tabulation (Patrascu & Thorup, 2012, "The power of simple tabulation hashing"): any three
elements draw independently. A multiplication by an odd number, modulo 2^32, gives each use its own 16 bits,
the upper half of the product. It also mixes the bits of x: otherwise the rounding errors of two periods would
be equal up to sign, and those of a matrix nearly of rank one.

    moments    x * 0xD2511F53 >> 16
    weights    x * 0xCD9E8D57 >> 16

Philox generates four words at once. Elements of a period form blocks of 4096, whose four quarters of 1024
take one of the four words each, so that a kernel generates each word where it is used.

    table[e]:    counter (e div 4096 * 1024 + e mod 1024, 2^32 - 1, step, index), word e div 1024 mod 4
    periods[p]:  counter (p, its upper half, step, index), word 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import jit, tl

QUARTER = 1024
BLOCK = 4 * QUARTER
PERIOD = 16 * BLOCK

_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def table_of_words(seed: int, step: Tensor, index: int, first: int = 0, stop: int = PERIOD) -> Tensor:
    """Words `first` to `stop` of a period's table: their bits as int32, on the device of `step`."""
    start = first // BLOCK
    counter = torch.arange(start * QUARTER, -(-stop // BLOCK) * QUARTER, device=step.device)
    words = philox(seed, counter, _word(_LOW, step), step.to(torch.int64), _word(index, step))
    table = torch.empty(counter.numel() // QUARTER, 4, QUARTER, dtype=torch.int32, device=step.device)
    for quarter, word in enumerate(words):
        table[:, quarter].copy_(word.view(-1, QUARTER))
    return table.view(-1)[first - start * BLOCK : stop - start * BLOCK]


def words_of_periods(seed: int, step: Tensor, index: int, first: int, stop: int) -> Tensor:
    """Words of periods `first` to `stop`: their bits as int32, on the device of `step`."""
    period = torch.arange(first, stop, device=step.device)
    words = philox(seed, period & _LOW, period >> 32, step.to(torch.int64), _word(index, step))
    return words[0].to(torch.int32)


def _word(number: int, like: Tensor) -> Tensor:
    return torch.tensor(number, device=like.device)


def rounding_noise(words: Tensor, use: int, out: Tensor) -> Tensor:
    """The 16 bits of int32 words x for a use, in `out`: use 0 is moments, 1 weights."""
    torch.mul(words, _signed(_FACTORS[use]), out=out)
    return out.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _signed(word: int) -> int:
    """Reinterpret 32 unsigned bits as int32."""
    return (word + 2**31) % 2**32 - 2**31


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four int64 tensors of 32-bit words: four such words."""
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    c0, c1, c2, c3 = (c.clone() for c in torch.broadcast_tensors(c0, c1, c2, c3))
    product0, product1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS):
        # int64 wraps around, which preserves the 64 bits of an unsigned product. The lower word is not
        # masked.
        torch.mul(c0, _FACTORS[0], out=product0)
        torch.mul(c2, _FACTORS[1], out=product1)
        torch.bitwise_right_shift(product1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3, product0, product1 = product1, product0, c1, c3
        k0, k1 = k0 + _KEYS[0] & _LOW, k1 + _KEYS[1] & _LOW
    return c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW)


@jit
def block_of_words(seed, step, index, block, lanes, QUARTER: tl.constexpr, PERIOD: tl.constexpr):
    """Four uint32 [QUARTER], one per quarter of a block; `lanes` holds 0 to QUARTER - 1."""
    lanes = lanes.to(tl.uint32)
    block = index * 0 + block  # a tensor in the interpreter too, whose loops count in Python ints
    step, index = step.to(tl.uint32), index.to(tl.uint32)
    period = block // (PERIOD // (4 * QUARTER))
    low = lanes + (block % (PERIOD // (4 * QUARTER)) * QUARTER).to(tl.uint32)
    zero = lanes * 0
    w0, w1, w2, w3 = tl.philox(seed, low, zero + 0xFFFFFFFF, zero + step, zero + index)
    of_period, _, _, _ = tl.philox(seed, period.to(tl.uint32), (period >> 32).to(tl.uint32), step, index)
    return w0 ^ of_period, w1 ^ of_period, w2 ^ of_period, w3 ^ of_period


@jit
def moment_noise(words):
    return ((words * 0xD2511F53) >> 16).to(tl.int32)


@jit
def weight_noise(words):
    return ((words * 0xCD9E8D57) >> 16).to(tl.int32)
