"""The chunks of packed documents, which never share one, and how operands are divided for the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl, use_triton

CHUNK = 64
SEGMENT = 64 * CHUNK  # tokens of a document that the states pass in one go; fixed, whatever is packed with it


class ChunkTable(NamedTuple):
    """Where the chunks and segments of packed documents are. Every document has at least one segment.

    Attributes:
        cu_seqlens: [documents + 1] int32.
        ranges: [2, chunks] int32, the first token of every chunk and the end of its document; both 0 for
            chunks that do not exist.
        segments: [4, segments] int32, the document of every segment, its first token, the token after its
            last, and its first chunk; the document is -1 for segments that do not exist.
        first_segments: [documents] int32, the number of each document's first segment.
        boundaries: at most so many segments follow another of their document.
        segment: tokens of a segment.
    """

    cu_seqlens: Tensor
    ranges: Tensor
    segments: Tensor
    first_segments: Tensor
    boundaries: int
    segment: int


def chunk_table(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> ChunkTable:
    """The chunks and segments of documents, found by one kernel without waiting for the device."""
    if cu_seqlens is None:
        cu_seqlens = torch.arange(2, dtype=torch.int32, device=device) * tokens
    cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    documents, boundaries = len(cu_seqlens) - 1, max(tokens - 1, 0) // SEGMENT
    chunks, count = tokens // CHUNK + documents, boundaries + documents
    ranges = torch.empty(2, chunks, dtype=torch.int32, device=device)
    segments = torch.empty(4, count, dtype=torch.int32, device=device)
    first_segments = torch.empty(documents, dtype=torch.int32, device=device)
    if documents:
        with on_device_of(ranges):
            table_kernel[(ceil_div(max(chunks, count), _PIECES), 2)](
                cu_seqlens,
                ranges,
                segments,
                first_segments,
                documents,
                chunks,
                count,
                SEGMENT=SEGMENT,
                PIECES=_PIECES,
                DOCUMENTS=64,
                num_warps=4,
            )
    return ChunkTable(cu_seqlens, ranges, segments, first_segments, boundaries, SEGMENT)


_PIECES = 128  # chunks or segments of a program


@jit
def table_kernel(
    cu_seqlens,
    ranges,
    segments,
    first_segments,
    documents,
    chunks,
    count,
    SEGMENT: tl.constexpr,
    PIECES: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Each program goes through all documents, and finds those of its chunks or of its segments."""
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    of_segments = tl.program_id(1) == 1
    size = tl.where(of_segments, SEGMENT, 64)
    opening = tl.zeros([PIECES], tl.int32)
    ending = tl.zeros([PIECES], tl.int32)
    nth = tl.zeros([PIECES], tl.int32)  # one more than the document, 0 for none
    chunk = tl.zeros([PIECES], tl.int32)
    pieces_before = 0
    chunks_before = 0
    for begin in range(0, documents, DOCUMENTS):
        document = begin + tl.arange(0, DOCUMENTS)
        exists = document < documents
        first = tl.load(cu_seqlens + document, exists, 0)
        end = tl.load(cu_seqlens + document + 1, exists, 0)
        chunk_counts = (end - first + 63) // 64
        segment_counts = tl.where(exists, tl.maximum((end - first + SEGMENT - 1) // SEGMENT, 1), 0)
        piece_counts = tl.where(of_segments, segment_counts, chunk_counts)
        last_pieces = pieces_before + tl.cumsum(piece_counts, 0)
        first_pieces = last_pieces - piece_counts
        first_chunks = chunks_before + tl.cumsum(chunk_counts, 0) - chunk_counts
        tl.store(first_segments + document, first_pieces, exists & of_segments & (tl.program_id(0) == 0))
        within = piece[:, None] - first_pieces[None, :]
        found = (within >= 0) & (piece[:, None] < last_pieces[None, :])
        opening += tl.sum(tl.where(found, first[None, :] + within * size, 0), 1)
        ending += tl.sum(tl.where(found, end[None, :], 0), 1)
        nth += tl.sum(tl.where(found, document[None, :] + 1, 0), 1)
        chunk += tl.sum(tl.where(found, first_chunks[None, :] + within * (SEGMENT // 64), 0), 1)
        pieces_before += tl.sum(piece_counts, 0)
        chunks_before += tl.sum(chunk_counts, 0)
    if of_segments:
        inside = piece < count
        tl.store(segments + piece, nth - 1, inside)
        tl.store(segments + count + piece, opening, inside)
        tl.store(segments + 2 * count + piece, tl.minimum(opening + SEGMENT, ending), inside)
        tl.store(segments + 3 * count + piece, chunk, inside)
    else:
        inside = piece < chunks
        tl.store(ranges + piece, opening, inside)
        tl.store(ranges + chunks + piece, ending, inside)


def use_chunks(q: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels run for these operands, on a GPU only with the tiles that were verified there.

    Triton 3.6 miscompiles some products with fewer than 64 columns for Hopper: results were wrong, or memory
    was touched that is not the kernel's. Narrower heads and float32, which takes narrower tiles, run in the
    plain form.
    """
    verified = q.dtype != torch.float32 and min(q.shape[-1], v.shape[-1]) >= 64
    return use_triton(q, v, *others) and (verified or not q.is_cuda)


def with_whole_heads(x: Tensor) -> Tensor:
    """[T, heads, D] whose heads are contiguous and next to one another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def product_precision(dtype: torch.dtype) -> str:
    """How products of this dtype are computed: float32 as three of TF32, to within a rounding or two."""
    if dtype != torch.float32:
        return "tf32"  # ignored for 16 bits
    return "ieee" if torch.version.hip else "tf32x3"


def block_of_keys(dk: int) -> int:
    """Key channels of one program: all of them."""
    return max(16, next_power_of_2(dk))


def block_of_values(dv: int, most: int) -> int:
    """Value channels of one program."""
    return min(most, max(16, next_power_of_2(dv)))
