"""Kernels that pass the states of the gated delta rule; `_delta_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    columns_of,
    fetch,
    numbers_of_chunk,
    segment_of,
    square_of,
    state_rows,
    store_columns,
    store_rows,
    store_state,
)


@jit
def states_kernel(
    q,
    k,
    v,
    transfer,
    scores,
    decays,
    betas,
    read_factors,
    write_factors,
    query_factors,
    q_lengths,
    k_lengths,
    q_tiles,
    k_tiles,
    v_tiles,
    transfer_tiles,
    score_tiles,
    cu_seqlens,
    segments,
    initial,
    boundaries,
    transfers,
    o,
    states,
    new_values,
    final,
    q_stride,
    k_stride,
    v_stride,
    segment_count,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """As `states_kernel` of `_channel_state_kernels.py`, with N = T (V - exp(G) K S)."""
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if document < 0:
        return
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    key = tl.arange(0, BLOCK_K)
    block, width = tl.program_id(0), DV
    of_values, of_transfer = block < tl.cdiv(DV, BLOCK_V), block >= tl.cdiv(DV, BLOCK_V)
    if LOCAL:
        if (end == ending) | (of_transfer & (first == opening)):
            return
        block = tl.where(of_transfer, block - tl.cdiv(DV, BLOCK_V), block)
        width = tl.where(of_transfer, DK, DV)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (column < width)[:, None] & (key < DK)[None, :]
    place = column[:, None] + key[None, :] * width
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    live = tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside & of_values & (first == opening), 0.0)
    if LOCAL:
        state += tl.where(of_transfer & (column[:, None] == key[None, :]), 1.0, 0.0)
    elif boundaries is not None:
        before = ((boundary - 1) * HEADS + head) * DK * DV
        state += tl.load(boundaries + before + place, inside & (first > opening), 0.0)
    for nth in tl.range(0, tl.cdiv(end - first, 64), disable_licm=True):
        start = first + nth * 64
        count = end - start
        square = chunk * HEADS + head
        # Nothing fetches these ahead: here they arrive while the first products run.
        last = tl.load(decays + square * 64 + 63)
        if o is not None:
            asks = numbers_of_chunk(query_factors, square)
        k_rows = columns_of(k, k_tiles, k_stride, start, count, key_head, 0, BLOCK_K, DK)
        v_rows = columns_of(v, v_tiles, v_stride, start, count, head, block * BLOCK_V, BLOCK_V, DV)
        values = tl.trans(v_rows).to(tl.float32)
        if LOCAL:
            values = tl.where(of_values, values, 0.0)
        solve = tl.trans(square_of(transfer, transfer_tiles, square))
        rounded = state.to(dtype)
        if states is not None:
            store_state(states, rounded, square, column, key, DK, DV)
        read = tl.dot(rounded, tl.trans(k_rows), input_precision=PRECISION)
        read *= numbers_of_chunk(read_factors, square)[None, :]
        residual = tl.where(live < count, values - read, 0.0).to(dtype)
        new = tl.dot(residual, solve, input_precision=PRECISION)
        if new_values is not None:
            store_columns(new_values, new, HEADS * DV, start, count, head * DV, column, DV)
        if o is not None:
            q_rows = columns_of(q, q_tiles, q_stride, start, count, key_head, 0, BLOCK_K, DK)
            score = tl.trans(square_of(scores, score_tiles, square))
            out = tl.dot(rounded, tl.trans(q_rows), input_precision=PRECISION)
            out *= asks[None, :]
            out += tl.dot(new.to(dtype), score, input_precision=PRECISION)
            store_columns(o, out, HEADS * DV, start, count, head * DV, column, DV)
        written = (new * numbers_of_chunk(write_factors, square)[None, :]).to(dtype)
        state *= tl.exp(last)
        state += tl.dot(written, k_rows, input_precision=PRECISION)
        chunk += 1
    if LOCAL:
        after = (boundary * HEADS + head) * DK
        tl.store(boundaries + after * DV + place, state, inside & of_values)
        tl.store(transfers + after * DK + place, state, inside & of_transfer)
    else:
        tl.store(final + of_document + place, state, inside & (end == ending))


@jit
def state_grads_kernel(
    q,
    k,
    do,
    transfer,
    scores,
    decays,
    betas,
    read_factors,
    write_factors,
    query_factors,
    q_lengths,
    k_lengths,
    q_tiles,
    k_tiles,
    do_tiles,
    new_tiles,
    transfer_tiles,
    score_tiles,
    cu_seqlens,
    segments,
    dfinal,
    dboundaries,
    new_values,
    states,
    written,
    carried,
    dvalues,
    dinitial,
    q_stride,
    k_stride,
    do_stride,
    written_stride,
    segment_count,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """As `state_grads_kernel` of `_channel_state_kernels.py`, with dV = T^T dN. Write dV, and in place of dS'
    the numbers that the gradients of k and of the decays take from it: (exp(G_C - G) / |k|) N dS'^T, in a
    part for each block of values, and S times dS', summed over keys.
    """
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if (document < 0) | (LOCAL & (first == opening)):
        return
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    chunks = tl.cdiv(end - first, 64)
    chunk += chunks - 1
    key = tl.arange(0, BLOCK_K)
    begin = tl.program_id(0) * BLOCK_V
    column = begin + tl.arange(0, BLOCK_V)
    inside = (column < DV)[:, None] & (key < DK)[None, :]
    place = column[:, None] + key[None, :] * DV
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    live = tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    dstate = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if dfinal is not None:
        dstate += tl.load(dfinal + of_document + place, inside & (end == ending), 0.0)
    if dboundaries is not None and not LOCAL:
        after = (boundary * HEADS + head) * DK * DV
        dstate += tl.load(dboundaries + after + place, inside & (end < ending), 0.0)
    for nth in tl.range(0, chunks, disable_licm=True):
        start = first + (chunks - 1 - nth) * 64
        count = end - start
        square = chunk * HEADS + head
        # Nothing fetches these ahead: here they arrive while the first products run.
        last = tl.load(decays + square * 64 + 63)
        if LOCAL:
            writes = numbers_of_chunk(write_factors, square)
        elif new_tiles is not None:  # then DV and DK are 128
            following = (chunk - (nth + 1 < chunks).to(tl.int64)) * HEADS + head
            fetch(states + following * DK * DV + begin * DK, BLOCK_V * DK)
        q_rows = columns_of(q, q_tiles, q_stride, start, count, key_head, 0, BLOCK_K, DK)
        k_rows = columns_of(k, k_tiles, k_stride, start, count, key_head, 0, BLOCK_K, DK)
        do_rows = columns_of(do, do_tiles, do_stride, start, count, head, begin, BLOCK_V, DV)
        dout = tl.where(live < count, tl.trans(do_rows), 0.0)
        solve = square_of(transfer, transfer_tiles, square)
        score = square_of(scores, score_tiles, square)
        rounded = dstate.to(dtype)
        if written is not None:
            writes = numbers_of_chunk(write_factors, square)
            new = columns_of(new_values, new_tiles, HEADS * DV, start, count, head, begin, BLOCK_V, DV)
            wrote = tl.dot(new, rounded, input_precision=PRECISION)
            state = state_rows(states, None, square, key, begin, BLOCK_V, DK, DV)
            # By column, which needs no sum over warps.
            by_column = tl.sum(state.to(tl.float32) * dstate, 1)
            tl.store(carried + square * DV + column, by_column, column < DV)
            wrote *= writes[:, None]
            part = written + tl.program_id(0).to(tl.int64) * written_stride
            store_rows(part, wrote, start, count, head, key, HEADS, DK)
        dnew = tl.dot(rounded, tl.trans(k_rows), input_precision=PRECISION)
        dnew *= (writes if LOCAL else numbers_of_chunk(write_factors, square))[None, :]
        dnew += tl.dot(dout, score, input_precision=PRECISION)
        dvalue = tl.dot(dnew.to(dtype), solve, input_precision=PRECISION)
        if dvalues is not None:
            store_columns(dvalues, dvalue, HEADS * DV, start, count, head * DV, column, DV)
        asked = (dout.to(tl.float32) * numbers_of_chunk(query_factors, square)[None, :]).to(dtype)
        # Negative, to add the product in place.
        read = (dvalue * -numbers_of_chunk(read_factors, square)[None, :]).to(dtype)
        dstate *= tl.exp(last)
        dstate += tl.dot(asked, q_rows, input_precision=PRECISION)
        dstate += tl.dot(read, k_rows, input_precision=PRECISION)
        chunk -= 1
    if LOCAL:
        before = ((boundary - 1) * HEADS + head) * DK * DV
        tl.store(dboundaries + before + place, dstate, inside)
    elif dinitial is not None:
        tl.store(dinitial + of_document + place, dstate, inside & (first == opening))
