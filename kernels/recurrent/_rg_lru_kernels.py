"""Kernels of the RG-LRU on pieces of 32 tokens; `_rg_lru_pieces.py` says who does what."""

# mypy: disable-error-code="assignment"
# mypy cannot type tuples of Triton values that grow in unrolled loops.

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.recurrent._chunk_tiles import softplus


@jit
def opening_kernel(
    opens, state, cu_seqlens, segments, first_segments, count, columns, documents, BLOCK: tl.constexpr
):
    """state: None, or of documents of which the last column says whether they have begun."""
    document = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = document < documents
    first = tl.load(cu_seqlens + document, exists, 0)
    opening = exists & (tl.load(cu_seqlens + document + 1, exists, 0) > first)
    if state is not None:
        begun = tl.load(state + (document + 1).to(tl.int64) * columns - 1, exists, 1.0)
        opening = opening & (begun == 0.0)
    chunk = tl.load(segments + 3 * count + tl.load(first_segments + document, exists, 0), exists, 0)
    tl.store(opens + chunk, 1, opening)


@jit
def _piece_of(ranges, opens, chunks, PIECE: tl.constexpr):
    """A program's piece, its first token, the token after its last (equal or before it if there is none),
    and the token that begins a document, -1 for none.
    """
    piece = tl.program_id(0)
    first = tl.load(ranges + piece // 2) + piece % 2 * PIECE
    end = tl.minimum(first + PIECE, tl.load(ranges + chunks + piece // 2))
    opening = tl.where((tl.load(opens + piece // 2) == 1) & (piece % 2 == 0), first, -1)
    return piece, first, end, opening


@jit
def _channels_of(bias, decay, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program's head, its channels there, which exist, and their biases and rates of decay."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    head = tl.program_id(1) // blocks
    column = tl.program_id(1) % blocks * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    of_input = tl.load(bias + 2 * head * WIDTH + column, exists, 0.0).to(tl.float32)
    of_recurrence = tl.load(bias + (2 * head + 1) * WIDTH + column, exists, 0.0).to(tl.float32)
    raw = tl.load(decay + head * WIDTH + column, exists, 0.0).to(tl.float32)
    return head, column, exists, of_input, of_recurrence, 8.0 * softplus(raw), raw


@jit
def _rows_of(values, begin, end, stride, exists, COUNT: tl.constexpr):
    """COUNT rows from `begin` on, zero from `end` on; `values`: of the program's channels."""
    rows = ()
    for nth in tl.static_range(COUNT):
        token = begin + nth
        row = tl.load(values + token.to(tl.int64) * stride, exists & (token < end), 0.0)
        rows += (row.to(tl.float32),)
    return rows


@jit
def _decay_of(gate, bias, rate, token, opening, end):
    """The recurrence gate, the decay, and the factor of the input, of a token: a decay of one past `end`."""
    r = tl.sigmoid(gate + bias)
    twice = 2.0 * r * rate
    a = tl.exp(-0.5 * twice)
    # 1 - exp(-x), for a small x by its series up to the seventh power
    series = 1.0 - twice * (1.0 / 6.0) * (1.0 - twice * (1.0 / 7.0))
    series = 1.0 - twice * 0.25 * (1.0 - twice * 0.2 * series)
    series = 1.0 - twice * 0.5 * (1.0 - twice * (1.0 / 3.0) * series)
    root = tl.sqrt(tl.where(twice < 0.25, twice * series, 1.0 - a * a))
    a = tl.where(token == opening, 0.0, tl.where(token < end, a, 1.0))
    return r, a, tl.where(token == opening, 1.0, root)


@jit
def local_kernel(
    x,
    gates,
    bias,
    decay,
    ranges,
    opens,
    dh,
    values,
    decays,
    x_stride,
    x_head,
    gates_stride,
    gates_head,
    gates_gate,
    dh_stride,
    dh_head,
    chunks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values, decays: [pieces, channels]; dh: None in the forward pass."""
    piece, first, end, opening = _piece_of(ranges, opens, chunks, PIECE)
    head, column, exists, of_input, of_recurrence, rate, _ = _channels_of(bias, decay, WIDTH, BLOCK)
    gates += head.to(tl.int64) * gates_head + column
    x += head.to(tl.int64) * x_head + column
    if dh is not None:
        dh += head.to(tl.int64) * dh_head + column
    value = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32) + 1.0
    for begin in range(first, end, GROUP):
        r_of = _rows_of(gates + gates_gate, begin, end, gates_stride, exists, GROUP)
        if dh is None:
            x_of = _rows_of(x, begin, end, x_stride, exists, GROUP)
            i_of = _rows_of(gates, begin, end, gates_stride, exists, GROUP)
        else:
            dh_of = _rows_of(dh, begin, end, dh_stride, exists, GROUP)
        for nth in tl.static_range(GROUP):
            _, a, root = _decay_of(r_of[nth], of_recurrence, rate, begin + nth, opening, end)
            product *= a
            if dh is None:
                value = tl.fma(a, value, root * tl.sigmoid(i_of[nth] + of_input) * x_of[nth])
            else:
                value = tl.fma(product, dh_of[nth], value)
    place = piece.to(tl.int64) * HEADS * WIDTH + head * WIDTH + column
    tl.store(values + place, value, exists)
    tl.store(decays + place, product, exists)


@jit
def pass_kernel(
    values,
    decays,
    initial,
    final,
    cu_seqlens,
    segments,
    first_segments,
    count,
    channels,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """values: states at the ends of pieces that start from zero -> states at their starts, in place; REVERSE:
    gradients at the starts -> gradients at the ends.

    initial, final: [documents, channels + 1], where the pass begins (None: zeros), and where it ends. The
    last column says whether the document has begun, and has no gradient.
    """
    document = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    length = tl.load(cu_seqlens + document + 1) - tl.load(cu_seqlens + document)
    pieces = (length + 63) // 64 * 2
    opening = tl.load(segments + 3 * count + tl.load(first_segments + document)).to(tl.int64) * 2
    of_document = document.to(tl.int64) * (channels + 1) + column
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state += tl.load(initial + of_document, column <= channels, 0.0)
    for begin in range(0, pieces, GROUP):
        added, kept = (), ()
        for nth in tl.static_range(GROUP):
            piece = opening + (pieces - 1 - begin - nth if REVERSE else begin + nth)
            real = inside & (begin + nth < pieces)
            added += (tl.load(values + piece * channels + column, real, 0.0),)
            kept += (tl.load(decays + piece * channels + column, real, 1.0),)
        for nth in tl.static_range(GROUP):
            piece = opening + (pieces - 1 - begin - nth if REVERSE else begin + nth)
            tl.store(values + piece * channels + column, state, inside & (begin + nth < pieces))
            state = tl.fma(kept[nth], state, added[nth])  # past the last: times one, plus zero
    if REVERSE:
        begun = 0.0
    else:
        begun = tl.where(length > 0, 1.0, state)  # of the last column that is the state given
    tl.store(final + of_document, tl.where(column == channels, begun, state), column <= channels)


@jit
def scan_kernel(
    x,
    gates,
    bias,
    decay,
    ranges,
    opens,
    starts,
    h,
    x_stride,
    x_head,
    gates_stride,
    gates_head,
    gates_gate,
    h_stride,
    h_head,
    chunks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece, first, end, opening = _piece_of(ranges, opens, chunks, PIECE)
    head, column, exists, of_input, of_recurrence, rate, _ = _channels_of(bias, decay, WIDTH, BLOCK)
    gates += head.to(tl.int64) * gates_head + column
    x += head.to(tl.int64) * x_head + column
    h += head.to(tl.int64) * h_head + column
    state = tl.load(starts + piece.to(tl.int64) * HEADS * WIDTH + head * WIDTH + column, exists, 0.0)
    for begin in range(first, end, GROUP):
        r_of = _rows_of(gates + gates_gate, begin, end, gates_stride, exists, GROUP)
        x_of = _rows_of(x, begin, end, x_stride, exists, GROUP)
        i_of = _rows_of(gates, begin, end, gates_stride, exists, GROUP)
        for nth in tl.static_range(GROUP):
            token = begin + nth
            _, a, root = _decay_of(r_of[nth], of_recurrence, rate, token, opening, end)
            state = tl.fma(a, state, root * tl.sigmoid(i_of[nth] + of_input) * x_of[nth])
            target = h + token.to(tl.int64) * h_stride
            tl.store(target, state.to(h.dtype.element_ty), exists & (token < end))


@jit
def grads_kernel(
    x,
    gates,
    bias,
    decay,
    ranges,
    opens,
    starts,
    states,
    dh,
    dends,
    dx,
    dgates,
    sums,
    x_stride,
    x_head,
    gates_stride,
    gates_head,
    gates_gate,
    dh_stride,
    dh_head,
    dx_stride,
    dx_head,
    dgates_stride,
    dgates_head,
    dgates_gate,
    chunks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dx and dgates, and by piece sums for the other gradients.

    sums: [3, pieces, channels], of the biases and of the decay; dends: gradients at the ends of pieces;
    states: [pieces, PIECE / GROUP, channels], room for the state before each group of tokens.
    """
    piece, first, end, opening = _piece_of(ranges, opens, chunks, PIECE)
    head, column, exists, of_input, of_recurrence, rate, raw = _channels_of(bias, decay, WIDTH, BLOCK)
    gates += head.to(tl.int64) * gates_head + column
    dgates += head.to(tl.int64) * dgates_head + column
    x += head.to(tl.int64) * x_head + column
    dx += head.to(tl.int64) * dx_head + column
    dh += head.to(tl.int64) * dh_head + column
    place = piece.to(tl.int64) * HEADS * WIDTH + head * WIDTH + column
    size = tl.num_programs(0).to(tl.int64) * HEADS * WIDTH
    if first >= end:
        for nth in tl.static_range(3):
            tl.store(sums + nth * size + place, tl.zeros([BLOCK], tl.float32), exists)
        return
    state = tl.load(starts + place, exists, 0.0)
    states += piece.to(tl.int64) * (PIECE // GROUP) * HEADS * WIDTH + head * WIDTH + column
    groups = tl.minimum(tl.maximum(end - first + GROUP - 1, 0) // GROUP, PIECE // GROUP)
    for group in range(0, groups):
        tl.store(states + group * HEADS * WIDTH, state, exists)
        begin = first + group * GROUP
        r_of = _rows_of(gates + gates_gate, begin, end, gates_stride, exists, GROUP)
        x_of = _rows_of(x, begin, end, x_stride, exists, GROUP)
        i_of = _rows_of(gates, begin, end, gates_stride, exists, GROUP)
        for nth in tl.static_range(GROUP):
            _, a, root = _decay_of(r_of[nth], of_recurrence, rate, begin + nth, opening, end)
            state = tl.fma(a, state, root * tl.sigmoid(i_of[nth] + of_input) * x_of[nth])
    gradient = tl.load(dends + place, exists, 0.0)
    dinput = tl.zeros([BLOCK], tl.float32)
    drecurrence = tl.zeros([BLOCK], tl.float32)
    drate = tl.zeros([BLOCK], tl.float32)
    for back in range(0, groups):
        group = groups - 1 - back  # last one first
        begin = first + group * GROUP
        r_of = _rows_of(gates + gates_gate, begin, end, gates_stride, exists, GROUP)
        x_of = _rows_of(x, begin, end, x_stride, exists, GROUP)
        i_of = _rows_of(gates, begin, end, gates_stride, exists, GROUP)
        dh_of = _rows_of(dh, begin, end, dh_stride, exists, GROUP)
        state = tl.load(states + group * HEADS * WIDTH, exists, 0.0)
        r_at, a_at, root_at, i_at, before = (), (), (), (), ()
        for nth in tl.static_range(GROUP):
            r, a, root = _decay_of(r_of[nth], of_recurrence, rate, begin + nth, opening, end)
            i = tl.sigmoid(i_of[nth] + of_input)
            r_at += (r,)
            a_at += (a,)
            root_at += (root,)
            i_at += (i,)
            before += (state,)
            state = tl.fma(a, state, root * i * x_of[nth])
        for nth in tl.static_range(GROUP):
            token = begin + (GROUP - 1 - nth)
            real = exists & (token < end)
            r, i = r_at[GROUP - 1 - nth], i_at[GROUP - 1 - nth]
            a, root = a_at[GROUP - 1 - nth], root_at[GROUP - 1 - nth]
            value = x_of[GROUP - 1 - nth]
            gradient += dh_of[GROUP - 1 - nth]
            by_input = gradient * root * i
            through = gradient * a * before[GROUP - 1 - nth]
            droot = gradient * i * value
            dlog = through - droot * a * a / tl.maximum(root, 1.0 / 2000.0)
            dlog = tl.where(real, dlog, 0.0)
            dr = -rate * dlog * r * (1.0 - r)
            di = by_input * value * (1.0 - i)
            gradient *= a
            drate -= r * dlog
            dinput += di
            drecurrence += dr
            target = dgates + token.to(tl.int64) * dgates_stride
            tl.store(target, di.to(dgates.dtype.element_ty), real)
            tl.store(target + dgates_gate, dr.to(dgates.dtype.element_ty), real)
            target = dx + token.to(tl.int64) * dx_stride
            tl.store(target, by_input.to(dx.dtype.element_ty), real)
    tl.store(sums + place, dinput, exists)
    tl.store(sums + size + place, drecurrence, exists)
    tl.store(sums + 2 * size + place, drate * 8.0 * tl.sigmoid(raw), exists)
