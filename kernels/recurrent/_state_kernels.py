"""Kernels that carry the state of a delta rule over the chunks of a document; `_channel_chunks.py` has the
formulas. Everything that does not depend on the state is prepared by other kernels, so that one chunk waits
for the one before it through two matrix products only.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import rows_of, store_rows


@jit
def states_kernel(
    writes,
    reads,
    values,
    queries,
    scores,
    cumulative,
    cu_seqlens,
    first_chunks,
    initial,
    o,
    states,
    new_values,
    final,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write O, or the state at the start of every chunk and N; `new_values` may be `values`."""
    head, document = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    chunk = tl.load(first_chunks + document).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = writes.dtype.element_ty
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside, 0.0)
    for nth in range(0, tl.cdiv(end - first, 64)):
        start = first + nth * 64
        count = end - start
        read_rows = rows_of(reads, HEADS * DK, start, count, head, key, DK)
        value_rows = rows_of(values, HEADS * DV, start, count, head, column, DV)
        write_rows = rows_of(writes, HEADS * DK, start, count, head, key, DK)
        last = (start + tl.minimum(count, 64) - 1).to(tl.int64)
        total = tl.load(cumulative + (last * HEADS + head) * DK + key, key < DK, 0.0)
        rounded = state.to(dtype)
        if states is not None:
            tl.store(states + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        new = value_rows.to(tl.float32) - tl.dot(read_rows, rounded, input_precision=PRECISION)
        if new_values is not None:
            store_rows(new_values, new, start, count, head, column, HEADS, DV)
        if o is not None:
            query_rows = rows_of(queries, HEADS * DK, start, count, head, key, DK)
            score = tl.load(scores + (chunk * HEADS + head) * 4096 + row * 64 + other)
            out = tl.dot(query_rows, rounded, input_precision=PRECISION)
            out += tl.dot(score, new.to(dtype), input_precision=PRECISION)
            store_rows(o, out, start, count, head, column, HEADS, DV)
        state *= tl.exp(total)[:, None]
        state += tl.dot(tl.trans(write_rows), new.to(dtype), input_precision=PRECISION)
        chunk += 1
    tl.store(final + of_document + place, state, inside)


@jit
def state_grads_kernel(
    writes,
    reads,
    queries,
    scores,
    cumulative,
    do,
    cu_seqlens,
    first_chunks,
    dfinal,
    dstates,
    dnew,
    dinitial,
    do_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write dS' of every chunk and dN, from the last chunk to the first."""
    head, document = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    chunks = tl.cdiv(end - first, 64)
    chunk = tl.load(first_chunks + document).to(tl.int64) + chunks - 1
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = writes.dtype.element_ty
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal is not None:
        dstate += tl.load(dfinal + of_document + place, inside, 0.0)
    for nth in range(0, chunks):
        start = first + (chunks - 1 - nth) * 64
        count = end - start
        do_rows = rows_of(do, do_stride, start, count, head, column, DV)
        write_rows = rows_of(writes, HEADS * DK, start, count, head, key, DK)
        query_rows = rows_of(queries, HEADS * DK, start, count, head, key, DK)
        read_rows = rows_of(reads, HEADS * DK, start, count, head, key, DK)
        score = tl.load(scores + (chunk * HEADS + head) * 4096 + other * 64 + row)  # transposed
        last = (start + tl.minimum(count, 64) - 1).to(tl.int64)
        total = tl.load(cumulative + (last * HEADS + head) * DK + key, key < DK, 0.0)
        rounded = dstate.to(dtype)
        tl.store(dstates + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        new = tl.dot(write_rows, rounded, input_precision=PRECISION)
        new += tl.dot(score, do_rows, input_precision=PRECISION)
        store_rows(dnew, new, start, count, head, column, HEADS, DV)
        dstate *= tl.exp(total)[:, None]
        dstate += tl.dot(tl.trans(query_rows), do_rows, input_precision=PRECISION)
        dstate -= tl.dot(tl.trans(read_rows), new.to(dtype), input_precision=PRECISION)
        chunk -= 1
    if dinitial is not None:
        tl.store(dinitial + of_document + place, dstate, inside)
