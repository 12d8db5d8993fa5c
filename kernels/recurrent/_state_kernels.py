"""Kernels that join the states of segments; see `_states.py`."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import segment_size


@jit
def boundaries_kernel(
    boundaries,
    transfers,
    cu_seqlens,
    first_segments,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Turn the local states at the boundaries of a document's segments into the true states: add to each the
    previous one, through the transfer of the segment between them. REVERSE: the same for gradients.
    """
    head, document = tl.program_id(1), tl.program_id(2)
    length = tl.load(cu_seqlens + document + 1) - tl.load(cu_seqlens + document)
    inner = (length - 1) // segment_size(length, SEGMENT, MOST)  # boundaries within the document
    first = (tl.load(first_segments + document) - document).to(tl.int64)
    key, from_key = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_K)[None, :]
    column = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    inside = (key < DK) & (column < DV)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for nth in range(0, inner):
        boundary = first + (inner - 1 - nth if REVERSE else nth)
        between = boundary + 1 if REVERSE else boundary
        square = (between * HEADS + head) * DK * DK
        entry = from_key * DK + key if REVERSE else key * DK + from_key
        known = (key < DK) & (from_key < DK) & (nth > 0)  # the first has no segment before it
        transfer = tl.load(transfers + square + entry, known, 0.0)
        place = boundaries + (boundary * HEADS + head) * DK * DV + key * DV + column
        state = tl.load(place, inside, 0.0) + tl.dot(transfer, state, input_precision=PRECISION)
        tl.store(place, state, inside)


@jit
def decayed_boundaries_kernel(
    boundaries,
    transfers,
    cu_seqlens,
    first_segments,
    boundary_count,
    heads,
    size,
    SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    """As `boundaries_kernel`, for transfers that are one factor per head: join the states `boundaries[0]`, or
    with BACK the gradients `boundaries[1]`.
    """
    head, document = tl.program_id(1), tl.program_id(2)
    length = tl.load(cu_seqlens + document + 1) - tl.load(cu_seqlens + document)
    inner = (length - 1) // segment_size(length, SEGMENT, MOST)  # boundaries within the document
    first = (tl.load(first_segments + document) - document).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    for nth in range(0, inner):
        boundary = first + (inner - 1 - nth if BACK else nth)
        between = boundary + BACK
        transfer = tl.load(transfers + between * heads + head, nth > 0, 0.0)  # none before the first
        place = boundaries + ((BACK * boundary_count + boundary) * heads + head) * size + element
        state = tl.load(place, element < size, 0.0) + transfer * state
        tl.store(place, state, element < size)
