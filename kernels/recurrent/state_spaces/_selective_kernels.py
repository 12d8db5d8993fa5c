"""Kernels of the selective scan on pieces of 32 tokens; `_selective_pieces.py` says who does what."""

# mypy: disable-error-code="assignment"
# mypy cannot type tuples of Triton values that grow in unrolled loops.

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import softplus


@jit
def _bounds_of(ranges, chunks, piece, PIECE: tl.constexpr):
    """First token of a piece, and the token after its last; equal, or reversed, if it has none."""
    first = tl.load(ranges + piece // 2) + piece % 2 * PIECE
    return first, tl.minimum(first + PIECE, tl.load(ranges + chunks + piece // 2))


@jit
def _load(values, token, stride, column, mask):
    return tl.load(values + token.to(tl.int64) * stride + column, mask, 0.0).to(tl.float32)


@jit
def _rows_of(values, begin, end, stride, column, exists, COUNT: tl.constexpr):
    """COUNT rows from `begin` on, zero from `end` on."""
    rows = ()
    for nth in tl.static_range(COUNT):
        token = begin + nth
        rows += (_load(values, token, stride, column, exists & (token < end)),)
    return rows


@jit
def _steps_of(dt, bias, begin, end, stride, column, exists, COUNT: tl.constexpr):
    """Steps of COUNT tokens from `begin` on, zero from `end` on."""
    steps = ()
    for nth in tl.static_range(COUNT):
        token = begin + nth
        real = exists & (token < end)
        steps += (tl.where(real, softplus(_load(dt, token, stride, column, real) + bias), 0.0),)
    return steps


@jit
def _tile_of(rates, channels, STATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's channels and elements of the state, which of these exist, their places and mask in
    [N, channels], and their rates for powers of two.
    """
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    element = tl.arange(0, BLOCK_N)
    exists, part = column < channels, element < STATE
    tile = element[:, None] * channels + column[None, :]
    inside = part[:, None] & exists[None, :]
    rate = tl.load(rates + tile, inside, 0.0) * 1.4426950408889634
    return column, element, exists, part, tile, inside, rate


@jit
def local_kernel(
    x,
    dt,
    B,
    C,
    dy,
    rates,
    dt_bias,
    ranges,
    ends,
    steps,
    dstarts,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    dy_stride,
    chunks,
    channels,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dstarts: None in the forward pass, as are C and dy."""
    piece = tl.program_id(0)
    first, end = _bounds_of(ranges, chunks, piece, PIECE)
    column, element, exists, part, tile, inside, rate = _tile_of(rates, channels, STATE, BLOCK_N, BLOCK_D)
    bias = tl.load(dt_bias + column, exists, 0.0).to(tl.float32)
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    decay = tl.zeros([BLOCK_N, BLOCK_D], tl.float32) + 1.0
    dstart = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for begin in range(first, end, GROUP):
        step_of = _steps_of(dt, bias, begin, end, dt_stride, column, exists, GROUP)
        x_of = _rows_of(x, begin, end, x_stride, column, exists, GROUP)
        b_of = _rows_of(B, begin, end, b_stride, element, part, GROUP)
        if dstarts is not None:
            c_of = _rows_of(C, begin, end, c_stride, element, part, GROUP)
            dy_of = _rows_of(dy, begin, end, dy_stride, column, exists, GROUP)
        for nth in tl.static_range(GROUP):
            a = tl.exp2(step_of[nth][None, :] * rate)
            state = tl.fma(a, state, b_of[nth][:, None] * (step_of[nth] * x_of[nth])[None, :])
            total += step_of[nth]
            if dstarts is not None:
                decay *= a
                dstart = tl.fma(decay, c_of[nth][:, None] * dy_of[nth][None, :], dstart)
    place = piece.to(tl.int64) * STATE * channels + tile
    tl.store(ends + place, state, inside)
    if dstarts is not None:
        tl.store(dstarts + place, dstart, inside)
    tl.store(steps + piece.to(tl.int64) * channels + column, total, exists)


@jit
def pass_kernel(
    values,
    steps,
    rates,
    initial,
    final,
    cu_seqlens,
    segments,
    first_segments,
    count,
    document_stride,
    channels,
    STATE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """values: states at the ends of pieces that start from zero -> states at their starts, in place; REVERSE:
    gradients at the starts -> gradients at the ends.

    initial, final: [documents, channels, N], or None; where the pass begins, and where it ends.
    """
    document = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < STATE * channels
    column = place % channels
    rate = tl.load(rates + place, inside, 0.0) * 1.4426950408889634
    length = tl.load(cu_seqlens + document + 1) - tl.load(cu_seqlens + document)
    pieces = (length + 63) // 64 * 2
    opening = tl.load(segments + 3 * count + tl.load(first_segments + document)).to(tl.int64) * 2
    of_document = document.to(tl.int64) * document_stride + column * STATE + place // channels
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document, inside, 0.0)
    for begin in range(0, pieces, GROUP):
        added, decays = (), ()
        for nth in tl.static_range(GROUP):
            piece = opening + (pieces - 1 - begin - nth if REVERSE else begin + nth)
            real = inside & (begin + nth < pieces)
            added += (tl.load(values + piece * STATE * channels + place, real, 0.0),)
            step = tl.load(steps + piece * channels + column, real, 0.0)
            decays += (tl.exp2(step * rate),)
        for nth in tl.static_range(GROUP):
            piece = opening + (pieces - 1 - begin - nth if REVERSE else begin + nth)
            real = inside & (begin + nth < pieces)
            tl.store(values + piece * STATE * channels + place, state, real)
            state = tl.fma(decays[nth], state, added[nth])  # past the last: times one, plus zero
    if final is not None:
        tl.store(final + of_document, state, inside)


@jit
def scan_kernel(
    x,
    dt,
    B,
    C,
    D,
    rates,
    dt_bias,
    ranges,
    starts,
    y,
    states,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    y_stride,
    chunks,
    channels,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write y, or if `states` is given, the state before every second group, [pieces, 4, N, channels]."""
    piece = tl.program_id(0)
    first, end = _bounds_of(ranges, chunks, piece, PIECE)
    column, element, exists, part, tile, inside, rate = _tile_of(rates, channels, STATE, BLOCK_N, BLOCK_D)
    bias = tl.load(dt_bias + column, exists, 0.0).to(tl.float32)
    state = tl.load(starts + piece.to(tl.int64) * STATE * channels + tile, inside, 0.0)
    if states is None:
        residual = tl.load(D + column, exists, 0.0).to(tl.float32)
    for begin in range(first, end, GROUP):
        step_of = _steps_of(dt, bias, begin, end, dt_stride, column, exists, GROUP)
        x_of = _rows_of(x, begin, end, x_stride, column, exists, GROUP)
        b_of = _rows_of(B, begin, end, b_stride, element, part, GROUP)
        if states is None:
            c_of = _rows_of(C, begin, end, c_stride, element, part, GROUP)
        else:
            group = (begin - first) // GROUP
            eighth = piece.to(tl.int64) * (PIECE // GROUP // 2) + group // 2
            tl.store(states + eighth * STATE * channels + tile, state, inside & (group % 2 == 0))
        for nth in tl.static_range(GROUP):
            a = tl.exp2(step_of[nth][None, :] * rate)
            state = tl.fma(a, state, b_of[nth][:, None] * (step_of[nth] * x_of[nth])[None, :])
            if states is None:
                token = begin + nth
                output = tl.fma(residual, x_of[nth], tl.sum(c_of[nth][:, None] * state, 0))
                target = y + token.to(tl.int64) * y_stride + column
                tl.store(target, output.to(y.dtype.element_ty), exists & (token < end))


@jit
def grads_kernel(
    x,
    dt,
    B,
    C,
    D,
    dy,
    rates,
    dt_bias,
    ranges,
    states,
    dends,
    dx,
    ddt,
    drates,
    sums,
    dbc,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    dy_stride,
    dx_stride,
    ddt_stride,
    chunks,
    channels,
    tokens,
    STATE: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write dx and ddt, and by piece or block of channels sums for the other gradients.

    drates: [pieces, N, channels]; sums: [2, pieces, channels], of D and of the bias;
    dbc: [2, blocks, T, N], of B and of C; dends: gradients at the ends of pieces, overwritten.
    """
    piece = tl.program_id(0)
    block = tl.program_id(1)
    first, end = _bounds_of(ranges, chunks, piece, PIECE)
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = column < channels
    bias = tl.load(dt_bias + column, exists, 0.0).to(tl.float32)
    residual = tl.load(D + column, exists, 0.0).to(tl.float32)
    of_piece = piece.to(tl.int64) * STATE * channels + column
    for n in range(STATE):
        tl.store(drates + of_piece + n * channels, tl.zeros([BLOCK_D], tl.float32), exists)
    dresidual = tl.zeros([BLOCK_D], tl.float32)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    tiles = tl.cdiv(tl.maximum(end - first, 0), TILE)
    for back in range(0, tiles):
        nth_tile = tiles - 1 - back
        begin = first + nth_tile * TILE
        of_tile = (piece.to(tl.int64) * (PIECE // TILE) + nth_tile) * STATE * channels + column
        step_of = _steps_of(dt, bias, begin, end, dt_stride, column, exists, TILE)
        x_of = _rows_of(x, begin, end, x_stride, column, exists, TILE)
        dy_of = _rows_of(dy, begin, end, dy_stride, column, exists, TILE)
        write_of, dwrite_of, dstep_of = (), (), ()
        for nth in tl.static_range(TILE):
            write_of += (step_of[nth] * x_of[nth],)
            dwrite_of += (tl.zeros([BLOCK_D], tl.float32),)
            dstep_of += (tl.zeros([BLOCK_D], tl.float32),)
        rows_of_b, rows_of_c = B + begin.to(tl.int64) * b_stride, C + begin.to(tl.int64) * c_stride
        rows_of_db = dbc + (block.to(tl.int64) * tokens + begin) * STATE
        rows_of_dc = rows_of_db + tl.num_programs(1).to(tl.int64) * tokens * STATE
        for n in range(STATE):
            rate = tl.load(rates + n * channels + column, exists, 0.0)
            state = tl.load(states + of_tile + n * channels, exists, 0.0)
            gradient = tl.load(dends + of_piece + n * channels, exists, 0.0)
            drate = tl.load(drates + of_piece + n * channels, exists, 0.0)
            decay_of, state_of, b_of = (), (state,), ()
            for nth in tl.static_range(TILE):
                b = tl.load(rows_of_b + nth * b_stride + n, begin + nth < end, 0.0).to(tl.float32)
                a = tl.exp2(step_of[nth] * (rate * 1.4426950408889634))
                state = tl.fma(a, state, b * write_of[nth])
                decay_of += (a,)
                state_of += (state,)
                b_of += (b,)
            more, slower = (), ()  # from the last token to the first
            for nth in tl.static_range(TILE):
                there = begin + (TILE - 1 - nth) < end
                c = tl.load(rows_of_c + (TILE - 1 - nth) * c_stride + n, there, 0.0).to(tl.float32)
                gradient = tl.fma(dy_of[TILE - 1 - nth], c, gradient)
                db = tl.sum(gradient * write_of[TILE - 1 - nth], 0)
                dc = tl.sum(dy_of[TILE - 1 - nth] * state_of[TILE - nth], 0)
                tl.store(rows_of_db + (TILE - 1 - nth) * STATE + n, db, there)
                tl.store(rows_of_dc + (TILE - 1 - nth) * STATE + n, dc, there)
                more += (tl.fma(gradient, b_of[TILE - 1 - nth], dwrite_of[TILE - 1 - nth]),)
                gradient *= decay_of[TILE - 1 - nth]
                through = gradient * state_of[TILE - 1 - nth]
                slower += (tl.fma(through, rate, dstep_of[TILE - 1 - nth]),)
                drate = tl.fma(through, step_of[TILE - 1 - nth], drate)
            dwrite_of, dstep_of = (), ()
            for nth in tl.static_range(TILE):
                dwrite_of += (more[TILE - 1 - nth],)
                dstep_of += (slower[TILE - 1 - nth],)
            tl.store(dends + of_piece + n * channels, gradient, exists)
            tl.store(drates + of_piece + n * channels, drate, exists)
        for nth in tl.static_range(TILE):
            token = begin + nth
            real = exists & (token < end)
            value = _load(x, token, x_stride, column, real)
            raw = _load(dt, token, dt_stride, column, real) + bias
            dstep = tl.fma(value, dwrite_of[nth], dstep_of[nth])
            draw = tl.where(real, dstep * tl.sigmoid(raw), 0.0)
            dvalue = tl.fma(residual, dy_of[nth], step_of[nth] * dwrite_of[nth])
            dresidual = tl.fma(dy_of[nth], value, dresidual)
            dbias += draw
            target = dx + token.to(tl.int64) * dx_stride + column
            tl.store(target, dvalue.to(dx.dtype.element_ty), real)
            target = ddt + token.to(tl.int64) * ddt_stride + column
            tl.store(target, draw.to(ddt.dtype.element_ty), real)
    target = sums + piece.to(tl.int64) * channels + column
    tl.store(target, dresidual, exists)
    tl.store(target + tl.num_programs(0).to(tl.int64) * channels, dbias, exists)
