"""Kernels of the gated delta rule on chunks of 64 tokens. `_delta_chunks.py` has the formulas and the names.

Rows behind a document's end are read as zeros, with the last token's running decay, so that no difference of
decays overflows.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl


@jit
def _numbers_of(numbers, start, count, head, HEADS: tl.constexpr):
    """One number of each of a chunk's tokens: [C], zero behind the first `count`."""
    row = tl.arange(0, 64)
    return tl.load(numbers + start.to(tl.int64) * HEADS + head + row * HEADS, row < count, 0.0)


@jit
def _store_numbers(numbers, values, start, count, head, HEADS: tl.constexpr):
    row = tl.arange(0, 64)
    tl.store(numbers + start.to(tl.int64) * HEADS + head + row * HEADS, values, row < count)


@jit
def _places(stride, start, count, head, column, D: tl.constexpr):
    """Where a chunk's rows of one head begin, their offsets [C, columns] from there, and which exist."""
    row = tl.arange(0, 64)
    # 64 bits for the beginning alone: offsets of a tile take registers.
    offsets = row[:, None] * stride + column[None, :]
    return start.to(tl.int64) * stride + head * D, offsets, (row < count)[:, None] & (column < D)[None, :]


@jit
def _rows_of(x, stride, start, count, head, column, D: tl.constexpr):
    """A chunk's rows of one head: [C, columns]."""
    begin, offsets, mask = _places(stride, start, count, head, column, D)
    return tl.load(x + begin + offsets, mask, 0.0)


@jit
def _store_rows(x, values, start, count, head, column, HEADS: tl.constexpr, D: tl.constexpr):
    """Write [C, columns] into contiguous [T, HEADS, D]."""
    begin, offsets, mask = _places(HEADS * D, start, count, head, column, D)
    tl.store(x + begin + offsets, values.to(x.dtype.element_ty), mask)


@jit
def _running_decay(cumulative, start, count, head, HEADS: tl.constexpr):
    """G of a chunk's tokens, that of the last one also behind it, and G of the last."""
    last = tl.load(cumulative + (start + tl.minimum(count, 64) - 1).to(tl.int64) * HEADS + head)
    g = _numbers_of(cumulative, start, count, head, HEADS)
    return tl.where(tl.arange(0, 64) < count, g, last), last


@jit
def _decay(g_row, g_column, seen):
    """exp(G_row - G_column) where `seen`, else 0; never infinite."""
    return tl.where(seen, tl.exp(tl.where(seen, g_row - g_column, 0.0)), 0.0)


@jit
def _log1p(x):
    """log(1 + x), 0 <= x <= 1, without losing a small x."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def _inverse_lengths(rows, l2_eps):
    wide = rows.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + l2_eps)


@jit
def _unit_inverses(blocks):
    """(1 + A)^-1 of strictly lower blocks A [4, 16, 16], by forward substitution."""
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    turned = tl.permute(blocks, (0, 2, 1))
    inverses = tl.where(row == column, 1.0, 0.0) + tl.zeros([4, 16, 16], tl.float32)
    for i in range(1, 16):
        factors = tl.sum(tl.where(column == i, turned, 0.0), 2)
        solved = -tl.sum(factors[:, :, None] * inverses, 1)
        inverses = tl.where((row == i) & (column < i), solved[:, None, :], inverses)
    return inverses


@jit
def _unit_inverse(A, PRECISION: tl.constexpr):
    """(1 + A)^-1 of a strictly lower A [64, 64].

    With D the inverses of 1 + A's blocks on the diagonal and M = D (A below those blocks), it is
    (1 + M)^-1 D = (1 - M) (1 + M^2) D, since M^4 = 0.
    """
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    first, second = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    blocks = tl.sum(tl.where(first == second, tl.reshape(A, [4, 16, 4, 16]), 0.0), 2)
    inverses = _unit_inverses(blocks)
    D = tl.reshape(tl.where(first == second, inverses[:, :, None, :], 0.0), [64, 64])
    M = tl.dot(D, tl.where(row // 16 > column // 16, A, 0.0), input_precision=PRECISION)
    squared = tl.dot(M, M, input_precision=PRECISION)
    inverse = D + tl.dot(squared, D, input_precision=PRECISION)
    return inverse - tl.dot(M, inverse, input_precision=PRECISION)


@jit
def prepare_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    transfer,
    cumulative,
    betas,
    q_scales,
    k_scales,
    ranges,
    q_stride,
    k_stride,
    a_stride,
    a_head,
    b_stride,
    b_head,
    chunks,
    beta_scale,
    l2_eps,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key_head = head // (HEADS // KEY_HEADS)
    key = tl.arange(0, BLOCK_K)
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    token = start.to(tl.int64) + tl.arange(0, 64)
    live = tl.arange(0, 64) < count

    shifted = tl.load(a + token * a_stride + head * a_head, live, 0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.maximum(shifted, 0.0) + _log1p(tl.exp(-tl.abs(shifted)))
    g = tl.cumsum(tl.where(live, -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus, 0.0), 0)
    rate = tl.load(b + token * b_stride + head * b_head, live, 0.0).to(tl.float32)
    beta = tl.where(live, beta_scale * tl.sigmoid(rate), 0.0)
    tl.store(cumulative + token * HEADS + head, g, live)
    tl.store(betas + token * HEADS + head, beta, live)

    k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
    k_scale = _inverse_lengths(k_rows, l2_eps)
    if head % (HEADS // KEY_HEADS) == 0:
        tl.store(k_scales + token * KEY_HEADS + key_head, k_scale, live)
        q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
        q_scale = scale * _inverse_lengths(q_rows, l2_eps)
        tl.store(q_scales + token * KEY_HEADS + key_head, q_scale, live)

    A = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
    A *= (beta * k_scale)[:, None] * k_scale[None, :] * _decay(g[:, None], g[None, :], row > column)
    inverse = _unit_inverse(A, SOLVE_PRECISION)
    place = transfer + (chunk.to(tl.int64) * HEADS + head) * 4096 + row * 64 + column
    tl.store(place, inverse.to(transfer.dtype.element_ty))


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
    first_chunks,
    initial,
    o,
    states,
    new_values,
    final,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, document = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    first, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    chunk = tl.load(first_chunks + document).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document + place, inside, 0.0)
    for nth in range(0, tl.cdiv(end - first, 64)):
        start = first + nth * 64
        count = end - start
        k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
        v_rows = _rows_of(v, v_stride, start, count, head, column, DV).to(tl.float32)
        g, last = _running_decay(cumulative, start, count, head, HEADS)
        beta = _numbers_of(betas, start, count, head, HEADS)
        k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
        solve = tl.load(transfer + (chunk * HEADS + head) * 4096 + row * 64 + other)
        rounded = state.to(dtype)
        if states is not None:
            tl.store(states + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        read = tl.dot(k_rows, rounded, input_precision=PRECISION) * (k_scale * tl.exp(g))[:, None]
        residual = (beta[:, None] * (v_rows - read)).to(dtype)
        new = tl.dot(solve, residual, input_precision=PRECISION)
        if new_values is not None:
            _store_rows(new_values, new, start, count, head, column, HEADS, DV)
        if o is not None:
            q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
            q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
            scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
            scores *= q_scale[:, None] * k_scale[None, :] * _decay(g[:, None], g[None, :], row >= other)
            out = tl.dot(q_rows, rounded, input_precision=PRECISION) * (q_scale * tl.exp(g))[:, None]
            out += tl.dot(scores.to(dtype), new.to(dtype), input_precision=PRECISION)
            _store_rows(o, out, start, count, head, column, HEADS, DV)
        written = (new * (k_scale * tl.exp(last - g))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(k_rows), written, input_precision=PRECISION)
        chunk += 1
    tl.store(final + of_document + place, state, inside)


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
    first_chunks,
    dfinal,
    dstates,
    dresiduals,
    dinitial,
    q_stride,
    k_stride,
    do_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, document = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    first, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    chunks = tl.cdiv(end - first, 64)
    chunk = tl.load(first_chunks + document).to(tl.int64) + chunks - 1
    key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < DK)[:, None] & (column < DV)[None, :]
    place = key[:, None] * DV + column[None, :]
    of_document = (document.to(tl.int64) * HEADS + head) * DK * DV
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal is not None:
        dstate += tl.load(dfinal + of_document + place, inside, 0.0)
    for nth in range(0, chunks):
        start = first + (chunks - 1 - nth) * 64
        count = end - start
        q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
        k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
        do_rows = _rows_of(do, do_stride, start, count, head, column, DV)
        g, last = _running_decay(cumulative, start, count, head, HEADS)
        beta = _numbers_of(betas, start, count, head, HEADS)
        q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
        k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
        # The transpose of T and of P: rows are keys, columns queries.
        solve = tl.load(transfer + (chunk * HEADS + head) * 4096 + other * 64 + row)
        scores = tl.dot(k_rows, tl.trans(q_rows), input_precision=PRECISION)
        scores *= k_scale[:, None] * q_scale[None, :] * _decay(g[None, :], g[:, None], other >= row)
        rounded = dstate.to(dtype)
        tl.store(dstates + (chunk * HEADS + head) * DK * DV + place, rounded, inside)
        dnew = tl.dot(k_rows, rounded, input_precision=PRECISION) * (k_scale * tl.exp(last - g))[:, None]
        dnew += tl.dot(scores.to(dtype), do_rows, input_precision=PRECISION)
        dresidual = tl.dot(solve, dnew.to(dtype), input_precision=PRECISION)
        _store_rows(dresiduals, dresidual, start, count, head, column, HEADS, DV)
        asked = (do_rows.to(tl.float32) * (q_scale * tl.exp(g))[:, None]).to(dtype)
        read = (dresidual * (beta * k_scale * tl.exp(g))[:, None]).to(dtype)
        dstate *= tl.exp(last)
        dstate += tl.dot(tl.trans(q_rows), asked, input_precision=PRECISION)
        dstate -= tl.dot(tl.trans(k_rows), read, input_precision=PRECISION)
        chunk -= 1
    if dinitial is not None:
        tl.store(dinitial + of_document + place, dstate, inside)


@jit
def _state_columns(states, offset, key, column, DK: tl.constexpr, DV: tl.constexpr):
    """Columns of a state, turned: [columns, BLOCK_K]."""
    inside = (column < DV)[:, None] & (key < DK)[None, :]
    return tl.load(states + offset + key[None, :] * DV + column[:, None], inside, 0.0)


@jit
def query_grads_kernel(
    q,
    k,
    do,
    cumulative,
    q_scales,
    k_scales,
    ranges,
    states,
    new_values,
    dq,
    dcumulatives,
    q_stride,
    k_stride,
    do_stride,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
    k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
    q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
    k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
    dq_rows = tl.zeros([64, BLOCK_K], tl.float32)  # of the scaled queries, over the value heads
    for nth in range(0, HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + nth
        offset = (chunk * HEADS + head) * DK * DV
        g, _ = _running_decay(cumulative, start, count, head, HEADS)
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            do_rows = _rows_of(do, do_stride, start, count, head, column, DV)
            new = _rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = _state_columns(states, offset, key, column, DK, DV)
            by_state += tl.dot(do_rows, state, input_precision=PRECISION)
            dscores += tl.dot(do_rows, tl.trans(new), input_precision=PRECISION)
        by_state *= tl.exp(g)[:, None]
        dq_rows += by_state
        dcumulative = q_scale * tl.sum(q_rows.to(tl.float32) * by_state, 1)
        dscores *= _decay(g[:, None], g[None, :], row >= other)
        scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        # A token's own score does not decay: left out, it need not cancel.
        product = tl.where(row > other, dscores * scores * q_scale[:, None] * k_scale[None, :], 0.0)
        dcumulative += tl.sum(product, 1) - tl.sum(product, 0)
        dq_rows += tl.dot((dscores * k_scale[None, :]).to(dtype), k_rows, input_precision=PRECISION)
        _store_numbers(dcumulatives, dcumulative, start, count, head, HEADS)
    # Through the normalisation: the part along the vector itself has no effect.
    unit = q_rows.to(tl.float32) * (q_scale / scale)[:, None]
    along = tl.sum(dq_rows * unit, 1)[:, None]
    _store_rows(dq, (dq_rows - unit * along) * q_scale[:, None], start, count, key_head, key, KEY_HEADS, DK)


@jit
def key_grads_kernel(
    q,
    k,
    v,
    do,
    cumulative,
    betas,
    q_scales,
    k_scales,
    ranges,
    states,
    dstates,
    new_values,
    dresiduals,
    dk,
    dv,
    dg,
    dbeta,
    q_stride,
    k_stride,
    v_stride,
    do_stride,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ranges + chunk), tl.load(ranges + chunks + chunk)
    count = end - start
    if count <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    row, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    dtype = q.dtype.element_ty
    k_rows = _rows_of(k, k_stride, start, count, key_head, key, DK)
    k_scale = _numbers_of(k_scales, start, count, key_head, KEY_HEADS)
    last_row = tl.arange(0, 64) == tl.minimum(count, 64) - 1
    dk_rows = tl.zeros([64, BLOCK_K], tl.float32)  # of the keys of length one, over the value heads
    for nth in range(0, HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + nth
        offset = (chunk * HEADS + head) * DK * DV
        g, last = _running_decay(cumulative, start, count, head, HEADS)
        beta = _numbers_of(betas, start, count, head, HEADS)

        # By the next state, and by the scores P.
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dscores = tl.zeros([64, 64], tl.float32)
        carried = 0.0
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            do_rows = _rows_of(do, do_stride, start, count, head, column, DV)
            new = _rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = _state_columns(states, offset, key, column, DK, DV)
            dstate = _state_columns(dstates, offset, key, column, DK, DV)
            by_state += tl.dot(new, dstate, input_precision=PRECISION)
            dscores += tl.dot(new, tl.trans(do_rows), input_precision=PRECISION)
            carried += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        by_state *= tl.exp(last - g)[:, None]
        dk_rows += by_state
        # Nor does what the last token writes into the next state.
        share = tl.where(last_row, 0.0, k_scale * tl.sum(k_rows.to(tl.float32) * by_state, 1))
        dcumulative = _numbers_of(dg, start, count, head, HEADS) - share
        dlast = tl.sum(share, 0) + tl.exp(last) * carried
        q_scale = _numbers_of(q_scales, start, count, key_head, KEY_HEADS)
        q_rows = _rows_of(q, q_stride, start, count, key_head, key, DK)
        dscores *= q_scale[None, :] * _decay(g[None, :], g[:, None], other >= row)
        dk_rows += tl.dot(dscores.to(dtype), q_rows, input_precision=PRECISION)

        # By what the keys read, V - exp(G) K S, and by A.
        by_state = tl.zeros([64, BLOCK_K], tl.float32)
        dsolve = tl.zeros([64, 64], tl.float32)
        drate = tl.zeros([64], tl.float32)
        for begin in range(0, DV, BLOCK_V):
            column = begin + tl.arange(0, BLOCK_V)
            dresidual = _rows_of(dresiduals, HEADS * DV, start, count, head, column, DV)
            new = _rows_of(new_values, HEADS * DV, start, count, head, column, DV)
            state = _state_columns(states, offset, key, column, DK, DV)
            v_rows = _rows_of(v, v_stride, start, count, head, column, DV)
            by_state += tl.dot(dresidual, state, input_precision=PRECISION)
            dsolve -= tl.dot(dresidual, tl.trans(new), input_precision=PRECISION)
            drate += tl.sum(dresidual.to(tl.float32) * v_rows.to(tl.float32), 1)
            dvalues = dresidual.to(tl.float32) * beta[:, None]
            _store_rows(dv, dvalues, start, count, head, column, HEADS, DV)
        by_state *= tl.exp(g)[:, None]
        dk_rows -= by_state * beta[:, None]
        share = k_scale * tl.sum(k_rows.to(tl.float32) * by_state, 1)
        drate -= share
        dcumulative -= beta * share
        dsolve *= _decay(g[:, None], g[None, :], row > other)
        gram = tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
        product = dsolve * gram * k_scale[:, None] * k_scale[None, :]
        drate += tl.sum(product, 1)
        product *= beta[:, None]
        dcumulative += tl.sum(product, 1) - tl.sum(product, 0)
        dsolve *= beta[:, None]
        both = ((dsolve + tl.trans(dsolve)) * k_scale[None, :]).to(dtype)
        dk_rows += tl.dot(both, k_rows, input_precision=PRECISION)

        dcumulative += tl.where(last_row, dlast, 0.0)
        # g of a token is in G of all that follow it in the chunk.
        _store_numbers(dg, tl.cumsum(dcumulative, 0, reverse=True), start, count, head, HEADS)
        _store_numbers(dbeta, drate, start, count, head, HEADS)
    unit = k_rows.to(tl.float32) * k_scale[:, None]
    along = tl.sum(dk_rows * unit, 1)[:, None]
    _store_rows(dk, (dk_rows - unit * along) * k_scale[:, None], start, count, key_head, key, KEY_HEADS, DK)
