"""Kernels that pass the states of the gated delta rule; `_delta_chunks.py` has the formulas."""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import (
    decay,
    numbers_of,
    rows_of,
    running_decay,
    segment_of,
    store_rows,
)


@jit
def states_kernel(
    q,
    k,
    v,
    transfer,
    cumulative,
    betas,
    q_scales,
    k_scales,
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
    """As `states_kernel` of `_channel_state_kernels.py`, with N = T R."""
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
    inside = (key < DK)[:, None] & (column < width)[None, :]
    place = key[:, None] * width + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
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
        k_rows = rows_of(k, k_stride, start, count, key_head, key, DK)
        value_count = count
        if LOCAL:
            value_count = tl.where(of_values, count, 0)
        v_rows = rows_of(v, v_stride, start, value_count, head, column, DV).to(tl.float32)
        g, last = running_decay(cumulative, start, count, head, HEADS)
        beta = numbers_of(betas, start, count, head, HEADS)
        k_scale = numbers_of(k_scales, start, count, key_head, KEY_HEADS)
        solve = tl.load(transfer + (chunk * HEADS + head) * 4096 + row * 64 + other)
        rounded = state.to(dtype)
        if states is not None:
            tl.store(states + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        read = tl.dot(k_rows, rounded, input_precision=PRECISION) * (k_scale * tl.exp(g))[:, None]
        residual = (beta[:, None] * (v_rows - read)).to(dtype)
        new = tl.dot(solve, residual, input_precision=PRECISION)
        if new_values is not None:
            store_rows(new_values, new, start, count, head, column, HEADS, DV)
        if o is not None:
            q_rows = rows_of(q, q_stride, start, count, key_head, key, DK)
            q_scale = numbers_of(q_scales, start, count, key_head, KEY_HEADS)
            scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
            scores *= q_scale[:, None] * k_scale[None, :] * decay(g[:, None], g[None, :], row >= other)
            out = tl.dot(q_rows, rounded, input_precision=PRECISION) * (q_scale * tl.exp(g))[:, None]
            out += tl.dot(scores.to(dtype), new.to(dtype), input_precision=PRECISION)
            store_rows(o, out, start, count, head, column, HEADS, DV)
        written = (new * (k_scale * tl.exp(last - g))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(k_rows), written, input_precision=PRECISION)
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
    cumulative,
    betas,
    q_scales,
    k_scales,
    cu_seqlens,
    segments,
    dfinal,
    dboundaries,
    dstates,
    dresiduals,
    dinitial,
    q_stride,
    k_stride,
    do_stride,
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
    """As `state_grads_kernel` of `_channel_state_kernels.py`, with dR = T^T dN."""
    document, first, end, chunk, opening, ending, boundary = segment_of(segments, segment_count, cu_seqlens)
    if (document < 0) | (LOCAL & (first == opening)):
        return
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    chunks = tl.cdiv(end - first, 64)
    chunk += chunks - 1
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal is not None:
        dstate += tl.load(dfinal + of_document + place, inside & (end == ending), 0.0)
    if dboundaries is not None and not LOCAL:
        after = (boundary * HEADS + head) * DK * DV
        dstate += tl.load(dboundaries + after + place, inside & (end < ending), 0.0)
    for nth in range(0, chunks):
        start = first + (chunks - 1 - nth) * 64
        count = end - start
        q_rows = rows_of(q, q_stride, start, count, key_head, key, DK)
        k_rows = rows_of(k, k_stride, start, count, key_head, key, DK)
        do_rows = rows_of(do, do_stride, start, count, head, column, DV)
        g, last = running_decay(cumulative, start, count, head, HEADS)
        beta = numbers_of(betas, start, count, head, HEADS)
        q_scale = numbers_of(q_scales, start, count, key_head, KEY_HEADS)
        k_scale = numbers_of(k_scales, start, count, key_head, KEY_HEADS)
        # The transpose of T and of P: rows are keys, columns queries.
        solve = tl.load(transfer + (chunk * HEADS + head) * 4096 + other * 64 + row)
        scores = tl.dot(k_rows, tl.trans(q_rows), input_precision=PRECISION)
        scores *= k_scale[:, None] * q_scale[None, :] * decay(g[None, :], g[:, None], other >= row)
        rounded = dstate.to(dtype)
        if dstates is not None:
            tl.store(dstates + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        dnew = tl.dot(k_rows, rounded, input_precision=PRECISION) * (k_scale * tl.exp(last - g))[:, None]
        dnew += tl.dot(scores.to(dtype), do_rows, input_precision=PRECISION)
        dresidual = tl.dot(solve, dnew.to(dtype), input_precision=PRECISION)
        if dresiduals is not None:
            store_rows(dresiduals, dresidual, start, count, head, column, HEADS, DV)
        asked = (do_rows.to(tl.float32) * (q_scale * tl.exp(g))[:, None]).to(dtype)
        read = (dresidual * (beta * k_scale * tl.exp(g))[:, None]).to(dtype)
        dstate *= tl.exp(last)
        dstate += tl.dot(tl.trans(q_rows), asked, input_precision=PRECISION)
        dstate -= tl.dot(tl.trans(k_rows), read, input_precision=PRECISION)
        chunk -= 1
    if LOCAL:
        before = ((boundary - 1) * HEADS + head) * DK * DV
        tl.store(dboundaries + before + place, dstate, inside)
    elif dinitial is not None:
        tl.store(dinitial + of_document + place, dstate, inside & (first == opening))
