"""Chunks of packed documents, none shared by two documents, and the division of operands into blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ROCM, ceil_div, jit, next_power_of_2, on_device_of, tl, use_triton
from liger_models.kernels.recurrent._chunk_tiles import segment_size

CHUNK = 64
SEGMENT = 64 * CHUNK  # the least tokens of a document per pass of the states


class ChunkTable(NamedTuple):
    """Positions of the chunks and segments of packed documents. Every document has at least one segment.

    Attributes:
        cu_seqlens: [documents + 1] int32.
        ranges: [2, chunks] int32, the first token of every chunk and the end of its document; both 0 for
            unused entries.
        segments: [5, segments] int32, the document of every segment, its first token, the token after its
            last, and its first chunk; the document is -1 for unused entries. Fifth, the numbers of all
            segments from the longest to the shortest, in which order they start: a long one that starts last
            would leave most of a GPU idle.
        first_segments: [documents] int32, the number of each document's first segment.
        boundaries: upper bound of the number of segments that follow another of their document.
        segment: tokens of a segment of a document of few segments.
        most: documents with more segments than this have longer ones: `tokens_of_segment`.
        full: every chunk is known to have 64 tokens.
    """

    cu_seqlens: Tensor
    ranges: Tensor
    segments: Tensor
    first_segments: Tensor
    boundaries: int
    segment: int
    most: int
    full: bool = False


class ChunkTables:
    """The tables of a batch's documents, each made once for all layers.

    Attributes:
        longest: no document has more tokens. Fewer launches suffice for documents that are known to be short.
        made: the tables, by the number of tokens and `most_segments` of their heads.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.made: dict[tuple[int, int], ChunkTable] = {}


def tokens_of_segment(length: int, most: int) -> int:
    """Tokens of a segment of a document of this length.

    From `most` segments on, a longer document has longer segments: joining them takes time for each, and all
    but the last are passed twice. Only the document and the number of heads count, so that it has the same
    bits alone and packed, on any GPU.
    """
    return SEGMENT * max(length // (most * SEGMENT), 1)


def most_segments(heads: int) -> int:
    """The number of segments from which on longer documents have longer ones: enough for a large GPU."""
    return max(ceil_div(_PROGRAMS, max(heads, 1)), 4)


def chunk_table(
    cu_seqlens: Tensor | None,
    tokens: int,
    device: torch.device,
    heads: int,
    tables: ChunkTables | None = None,
) -> ChunkTable:
    """Compute the chunks and segments of documents in one kernel, without synchronising with the device.

    heads: of the states, each with a program of its own.
    tables: of the same documents.

    Raises:
        ValueError: more segments than programs of a GPU's grid in this dimension.
    """
    most = most_segments(heads)
    if tables is None:
        return _make_table(cu_seqlens, tokens, device, most, tokens)
    found = tables.made.get((tokens, most))
    if found is None:
        found = _make_table(cu_seqlens, tokens, device, most, min(tables.longest, tokens))
        tables.made[tokens, most] = found
    return found


def _make_table(
    cu_seqlens: Tensor | None, tokens: int, device: torch.device, most: int, longest: int
) -> ChunkTable:
    """`chunk_table` for `most_segments` of the heads and documents of at most `longest` tokens."""
    if cu_seqlens is None:
        cu_seqlens = torch.arange(2, dtype=torch.int32, device=device) * tokens
    cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    documents = cu_seqlens.shape[0] - 1
    boundaries = max(tokens - 1, 0) // (tokens_of_segment(tokens, most) if documents == 1 else SEGMENT)
    boundaries = min(boundaries, documents * (max(longest - 1, 0) // SEGMENT))
    full = tokens == documents * longest and longest % CHUNK == 0  # then all documents are as long
    chunks, count = tokens // CHUNK + documents, boundaries + documents
    if count > _MOST_SEGMENTS:
        raise ValueError(
            f"found {documents} documents in {tokens} tokens, of {count} segments; expected at most "
            f"{_MOST_SEGMENTS}, the programs that a GPU runs for them: pack fewer documents in a batch"
        )
    ranges = torch.empty(2, chunks, dtype=torch.int32, device=device)
    segments = torch.empty(5, count, dtype=torch.int32, device=device)
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
                MOST=most,
                PIECES=_PIECES,
                DOCUMENTS=64,
                num_warps=4,
            )
    return ChunkTable(cu_seqlens, ranges, segments, first_segments, boundaries, SEGMENT, most, full)


_MOST_SEGMENTS = 65535
_PROGRAMS = 128  # per document
_PIECES = 32  # chunks or segments per program


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
    MOST: tl.constexpr,
    PIECES: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Go through all documents and find this program's chunks or segments."""
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    of_segments = tl.program_id(1) == 1
    opening = tl.zeros([PIECES], tl.int32)
    ending = tl.zeros([PIECES], tl.int32)
    nth = tl.zeros([PIECES], tl.int32)  # document + 1, 0 for none
    chunk = tl.zeros([PIECES], tl.int32)
    size = tl.zeros([PIECES], tl.int32)
    pieces_before = 0
    chunks_before = 0
    for begin in range(0, documents, DOCUMENTS):
        document = begin + tl.arange(0, DOCUMENTS)
        exists = document < documents
        first = tl.load(cu_seqlens + document, exists, 0)
        end = tl.load(cu_seqlens + document + 1, exists, 0)
        chunk_counts = (end - first + 63) // 64
        segment = segment_size(end - first, SEGMENT, MOST)
        segment_counts = tl.where(exists, tl.maximum((end - first + segment - 1) // segment, 1), 0)
        piece_counts = tl.where(of_segments, segment_counts, chunk_counts)
        last_pieces = pieces_before + tl.cumsum(piece_counts, 0)
        first_pieces = last_pieces - piece_counts
        first_chunks = chunks_before + tl.cumsum(chunk_counts, 0) - chunk_counts
        tl.store(first_segments + document, first_pieces, exists & of_segments & (tl.program_id(0) == 0))
        within = piece[:, None] - first_pieces[None, :]
        found = (within >= 0) & (piece[:, None] < last_pieces[None, :])
        tokens = tl.where(of_segments, segment, 64)[None, :]
        opening += tl.sum(tl.where(found, first[None, :] + within * tokens, 0), 1)
        ending += tl.sum(tl.where(found, end[None, :], 0), 1)
        nth += tl.sum(tl.where(found, document[None, :] + 1, 0), 1)
        chunk += tl.sum(tl.where(found, first_chunks[None, :] + within * (tokens // 64), 0), 1)
        size += tl.sum(tl.where(found, tokens, 0), 1)
        pieces_before += tl.sum(piece_counts, 0)
        chunks_before += tl.sum(chunk_counts, 0)
    if of_segments:
        inside = piece < count
        tl.store(segments + piece, nth - 1, inside)
        tl.store(segments + count + piece, opening, inside)
        tl.store(segments + 2 * count + piece, tl.minimum(opening + size, ending), inside)
        tl.store(segments + 3 * count + piece, chunk, inside)
        length = tl.minimum(ending - opening, size)
        longer = _count_before(cu_seqlens, documents, piece, length, SEGMENT, MOST, DOCUMENTS)
        tl.store(segments + 4 * count + tl.where(nth > 0, longer, piece), piece, inside)
    else:
        inside = piece < chunks
        tl.store(ranges + piece, opening, inside)
        tl.store(ranges + chunks + piece, ending, inside)


@jit
def _count_before(
    cu_seqlens,
    documents,
    piece,
    length,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """The number of segments that are longer than each of `piece`, or as long and before it."""
    counted = tl.zeros(piece.shape, tl.int32)
    before = 0
    for begin in range(0, documents, DOCUMENTS):
        document = begin + tl.arange(0, DOCUMENTS)
        exists = document < documents
        first = tl.load(cu_seqlens + document, exists, 0)
        size = tl.load(cu_seqlens + document + 1, exists, 0) - first
        segment = segment_size(size, SEGMENT, MOST)
        whole = tl.where(exists, tl.maximum((size + segment - 1) // segment, 1) - 1, 0)  # all but the last
        last = before + tl.cumsum(whole + exists.to(tl.int32), 0) - 1  # its number
        earlier = tl.maximum(tl.minimum(piece[:, None] - (last - whole)[None, :], whole[None, :]), 0)
        longer, as_long = length[:, None] < segment[None, :], length[:, None] == segment[None, :]
        counted += tl.sum(tl.where(longer, whole[None, :], tl.where(as_long, earlier, 0)), 1)
        rest = (size - whole * segment)[None, :]
        precedes = (rest > length[:, None]) | ((rest == length[:, None]) & (last[None, :] < piece[:, None]))
        counted += tl.sum((precedes & exists[None, :]).to(tl.int32), 1)
        before += tl.sum(whole + exists.to(tl.int32), 0)
    return counted


def use_chunks(q: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """Return True if the kernels support these operands; on a GPU, float32 heads wider than 64 exceed the
    shared memory and run the plain form.
    """
    fits = q.dtype != torch.float32 or max(q.shape[-1], v.shape[-1]) <= 64
    return use_triton(q, v, *others) and (fits or not q.is_cuda)


def with_whole_heads(x: Tensor) -> Tensor:
    """[T, heads, D] with contiguous, adjacent heads; a copy if necessary."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def product_precision(dtype: torch.dtype) -> str:
    """Precision of products of this dtype, and of the float32 products in their middle: float32 as three TF32
    products, exact to a rounding or two, and plain float32 on AMD's GPUs (only the MI300 has TF32).
    """
    if ROCM:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"  # ignored for 16 bits


def limit_registers(q: Tensor, registers: int) -> dict[str, int]:
    """Fit more programs on a multiprocessor; products in float32 need more registers."""
    return {} if ROCM or q.dtype == torch.float32 else {"maxnreg": registers}


# Columns per tile. On Hopper, Triton 3.6 compiles narrower products by wgmma that read past their tiles in
# shared memory.
NARROWEST = 64


def block_of_keys(dk: int) -> int:
    """Key channels per program: all of them."""
    return max(NARROWEST, next_power_of_2(dk))


def block_of_values(dv: int, most: int) -> int:
    """Value channels per program."""
    return min(most, max(NARROWEST, next_power_of_2(dv)))
