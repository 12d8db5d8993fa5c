"""Kernels that pass the states of the delta rule with a decay for each channel; see `_channel_chunks.py`.

Everything independent of the state is prepared beforehand, so that a chunk waits for its predecessor through
two matrix products only.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import rows_of, segment_of, store_rows


@jit
def states_kernel(
    writes,
    reads,
    values,
    queries,
    scores,
    totals,
    cu_seqlens,
    segments,
    initial,
    boundaries,
    transfers,
    o,
    states,
    new_values,
    final,
    segment_count,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Run one segment. Write O, or the state at the start of every chunk and N (over U), and the final state.

    LOCAL: write the state at the segment's end from a zero state (a document's first segment from the
    document's own initial state), and in further programs the segment's transfer, the end state for an
    identity at the start.
    """
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if document < 0:
        return
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    block, width = tl.program_id(0), DV
    of_values, of_transfer = block < tl.cdiv(DV, BLOCK_V), block >= tl.cdiv(DV, BLOCK_V)
    if LOCAL:
        if (end == ending) | (of_transfer & (first == opening)):
            return
        block = tl.where(of_transfer, block - tl.cdiv(DV, BLOCK_V), block)
        width = tl.where(of_transfer, DK, DV)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < width)[None, :]
    place = key[:, None] * width + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = writes.dtype.element_ty
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside & of_values & (first == opening), 0.0)
    if LOCAL:
        state += tl.where(of_transfer & (key[:, None] == column[None, :]), 1.0, 0.0)
    elif boundaries is not None:
        before = ((boundary - 1) * HEADS + head) * DK * DV
        state += tl.load(boundaries + before + place, inside & (first > opening), 0.0)
    for nth in range(0, tl.cdiv(end - first, 64)):
        start = first + nth * 64
        count = end - start
        read_rows = rows_of(reads, HEADS * DK, start, count, head, key, DK)
        value_count = count
        if LOCAL:
            value_count = tl.where(of_values, count, 0)
        value_rows = rows_of(values, HEADS * DV, start, value_count, head, column, DV)
        write_rows = rows_of(writes, HEADS * DK, start, count, head, key, DK)
        total = tl.load(totals + ((chunk + nth) * HEADS + head) * DK + key, key < DK, 0.0)
        rounded = state.to(dtype)
        if states is not None:
            tl.store(states + ((chunk + nth) * HEADS + head) * DK * DV + place, rounded, inside)
        new = value_rows.to(tl.float32) - tl.dot(read_rows, rounded, input_precision=PRECISION)
        if new_values is not None:
            store_rows(new_values, new, start, count, head, column, HEADS, DV)
        if o is not None:
            query_rows = rows_of(queries, HEADS * DK, start, count, head, key, DK)
            score = tl.load(scores + ((chunk + nth) * HEADS + head) * 4096 + row * 64 + other)
            out = tl.dot(query_rows, rounded, input_precision=PRECISION)
            out += tl.dot(score, new.to(dtype), input_precision=PRECISION)
            store_rows(o, out, start, count, head, column, HEADS, DV)
        state *= total[:, None]
        state += tl.dot(tl.trans(write_rows), new.to(dtype), input_precision=PRECISION)
    if LOCAL:
        after = (boundary * HEADS + head) * DK
        tl.store(boundaries + after * DV + place, state, inside & of_values)
        tl.store(transfers + after * DK + place, state, inside & of_transfer)
    else:
        tl.store(final + of_document + place, state, inside & (end == ending))


@jit
def state_grads_kernel(
    writes,
    reads,
    queries,
    scores,
    totals,
    do,
    cu_seqlens,
    segments,
    dfinal,
    dboundaries,
    dstates,
    dnew,
    dinitial,
    do_stride,
    segment_count,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Run one segment backward. Write dS' of every chunk, dN, and the initial state's gradient.

    LOCAL: write the gradient at the segment's start for a zero gradient at its end (a document's last segment
    for the gradient of the document's final state).
    """
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if (document < 0) | (LOCAL & (first == opening)):
        return
    head = tl.program_id(1)
    chunks = tl.cdiv(end - first, 64)
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = writes.dtype.element_ty
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal is not None:
        dstate += tl.load(dfinal + of_document + place, inside & (end == ending), 0.0)
    if dboundaries is not None and not LOCAL:
        after = (boundary * HEADS + head) * DK * DV
        dstate += tl.load(dboundaries + after + place, inside & (end < ending), 0.0)
    for nth in range(0, chunks):
        number = chunks - 1 - nth
        start = first + number * 64
        count = end - start
        do_rows = rows_of(do, do_stride, start, count, head, column, DV)
        write_rows = rows_of(writes, HEADS * DK, start, count, head, key, DK)
        query_rows = rows_of(queries, HEADS * DK, start, count, head, key, DK)
        read_rows = rows_of(reads, HEADS * DK, start, count, head, key, DK)
        score = tl.load(scores + ((chunk + number) * HEADS + head) * 4096 + other * 64 + row)  # transposed
        total = tl.load(totals + ((chunk + number) * HEADS + head) * DK + key, key < DK, 0.0)
        rounded = dstate.to(dtype)
        if dstates is not None:
            tl.store(dstates + ((chunk + number) * HEADS + head) * DK * DV + place, rounded, inside)
        new = tl.dot(score, do_rows, input_precision=PRECISION)
        new += tl.dot(write_rows, rounded, input_precision=PRECISION)
        if dnew is not None:
            store_rows(dnew, new, start, count, head, column, HEADS, DV)
        dstate *= total[:, None]
        dstate += tl.dot(tl.trans(query_rows), do_rows, input_precision=PRECISION)
        dstate -= tl.dot(tl.trans(read_rows), new.to(dtype), input_precision=PRECISION)
    if LOCAL:
        before = ((boundary - 1) * HEADS + head) * DK * DV
        tl.store(dboundaries + before + place, dstate, inside)
    elif dinitial is not None:
        tl.store(dinitial + of_document + place, dstate, inside & (first == opening))


@jit
def score_grads_kernel(
    b,
    do,
    new_values,
    scores,
    transfer,
    dnew,
    db,
    ranges,
    b_stride,
    b_head,
    do_stride,
    chunks,
    beta_scale,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write dV over dN, dP over P, dA over T, and db."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    rows = tl.arange(0, 64)
    row, other = rows[:, None], rows[None, :]
    dtype = transfer.dtype.element_ty
    token = start.to(tl.int64) + rows
    slope = tl.sigmoid(tl.load(b + token * b_stride + head * b_head, rows < count, 0.0).to(tl.float32))
    beta = tl.where(rows < count, beta_scale * slope, 0.0)
    square = (chunk * HEADS + head) * 4096
    solve = tl.load(transfer + square + other * 64 + row)  # transposed
    dscores = tl.zeros([64, 64], tl.float32)
    dsolve = tl.zeros([64, 64], tl.float32)
    drate = tl.zeros([64], tl.float32)
    for begin in range(0, DV, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        do_rows = rows_of(do, do_stride, start, count, head, column, DV)
        new = rows_of(new_values, HEADS * DV, start, count, head, column, DV)
        dnew_rows = rows_of(dnew, HEADS * DV, start, count, head, column, DV)
        dresidual = tl.dot(solve, dnew_rows, input_precision=PRECISION)
        drate += tl.sum(dresidual * new.to(tl.float32), 1)
        dvalue = (dresidual * beta[:, None]).to(dtype)
        store_rows(dnew, dvalue, start, count, head, column, HEADS, DV)
        dscores += tl.dot(do_rows, tl.trans(new), input_precision=PRECISION)
        dsolve -= tl.dot(dvalue, tl.trans(new), input_precision=PRECISION)
    tl.store(scores + square + row * 64 + other, tl.where(row >= other, dscores, 0.0).to(dtype))
    tl.store(transfer + square + row * 64 + other, tl.where(row > other, dsolve, 0.0).to(dtype))
    # beta dbeta = dR . N, and dbeta / db = beta (1 - sigmoid(b)).
    tl.store(db + token * HEADS + head, (drate * (1.0 - slope)).to(db.dtype.element_ty), rows < count)
