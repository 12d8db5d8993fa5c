"""Stored numbers of quantised weights: packing, and conversion to float32.

Numbers of four bits lie in bytes, the low half first, and so they do in 32-bit words, whose lowest bits come
first. float4 is E2M1 of the OCP Microscaling specification (version 1.0, section 5.3.3): a sign and one of
eight magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Codes:
    """Numbers of one kind.

    Attributes:
        label: for people.
        bits: per number.
        dtypes: of tensors that hold them.
        decode: from the words of some rows [rows, words] to float32 [rows, numbers]; a row may end in
        padding.
        numbers: how bytes hold them, in the terms of kernels/quantised/decode_codes.py.
    """

    label: str
    bits: int
    dtypes: tuple[torch.dtype, ...]
    decode: Callable[[Tensor], Tensor]
    numbers: str

    def words(self, columns: int) -> int:
        """The number of words that hold a row of `columns` numbers."""
        return -(-columns * self.bits // (8 * self.dtypes[0].itemsize))


def _bytes(words: Tensor) -> Tensor:
    """The bytes of words [rows, words], in memory order: uint8 [rows, bytes]."""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)


def _halves(values: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    """Decode words of half bytes, the low one first, by a table of 16 values."""
    halves = torch.tensor([[values[byte % 16], values[byte // 16]] for byte in range(256)], device="cpu")
    return lambda words: look_up_pairs(halves, words)


def look_up_pairs(table: Tensor, words: Tensor) -> Tensor:
    """The two numbers of each byte of words [rows, words] in a table float32 [256, 2]: [rows, 2 * bytes]."""
    pairs = table.view(torch.float64).view(256)  # moved as one number of 64 bits
    return _look_up(pairs, words).view(torch.float32)


def _look_up(table: Tensor, words: Tensor) -> Tensor:
    """The entry of each byte of words [rows, words] in a table of 256: [rows, bytes]. On a CPU this is
    several times faster than torch's conversion of float8, an embedding or indexing.
    """
    found = _bytes(words)
    return table.to(words.device).index_select(0, found.reshape(-1).int()).view(found.shape)


_FLOAT8 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
FLOAT8 = Codes("float8", 8, (torch.float8_e4m3fn,), lambda words: _look_up(_FLOAT8, words), "float8")
INT8 = Codes("int8", 8, (torch.int8,), lambda words: words.float(), "int8")
_FLOAT4 = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
FLOAT4 = Codes("float4", 4, (torch.uint8, torch.int8), _halves(_FLOAT4), "float4")
_INT4 = tuple(number - 8.0 for number in range(16))
PACKED = {
    4: Codes("int4", 4, (torch.int32,), _halves(_INT4), "int4"),
    8: Codes("int8", 8, (torch.int32,), lambda words: _bytes(words).float() - 128.0, "biased int8"),
}


def as_scale(stored: Tensor) -> Tensor:
    """Convert scales to float32, exactly. Bytes are exponents (E8M0): 2^(byte - 127), and 255 is NaN."""
    return scale_numbers(stored).float()


def scale_numbers(stored: Tensor) -> Tensor:
    """Scales in a dtype of numbers, without a copy."""
    return stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
