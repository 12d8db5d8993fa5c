"""The chunks of packed documents, which never share one, and how operands are divided for the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import next_power_of_2

CHUNK = 64


class ChunkTable(NamedTuple):
    """Where the chunks of packed documents are.

    Attributes:
        cu_seqlens: [documents + 1] int32.
        first_chunks: [documents] int32, the number of each document's first chunk.
        ranges: [2, at most so many chunks] int32, the first token of every chunk and the end of its
            document; both 0 for chunks that do not exist.
    """

    cu_seqlens: Tensor
    first_chunks: Tensor
    ranges: Tensor


def chunk_table(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> ChunkTable:
    """The chunks of documents, found without waiting for the device."""
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, tokens], device=device)
    bounds = cu_seqlens.to(torch.int32)
    counts = (bounds.diff() + (CHUNK - 1)) // CHUNK
    ends = counts.cumsum(0, dtype=torch.int32)
    first_chunks = ends - counts
    most = tokens // CHUNK + len(counts)
    chunk = torch.arange(most, dtype=torch.int32, device=device)
    document = torch.bucketize(chunk, ends, right=True)
    exists = document < len(counts)
    document = document.clamp(max=len(counts) - 1)
    first = bounds[document] + (chunk - first_chunks[document]) * CHUNK
    ranges = torch.stack([first, bounds[document + 1]]) * exists
    return ChunkTable(bounds, first_chunks, ranges.contiguous())


def with_whole_heads(x: Tensor) -> Tensor:
    """[T, heads, D] whose heads are contiguous and next to one another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def product_precision(dtype: torch.dtype) -> str:
    """How products of this dtype are computed: float32 as three of TF32, to within a rounding or two."""
    if dtype != torch.float32:
        return "tf32"  # ignored for 16 bits
    return "ieee" if torch.version.hip else "tf32x3"


def block_of_values(v: Tensor, most: int) -> int:
    """Value channels of one program."""
    return min(most, max(16, next_power_of_2(v.shape[2])))
