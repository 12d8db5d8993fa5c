"""Kernels of the short convolution: each program goes down the tokens of a few channels.

Values needed by the next token stay in registers, in tuples that Triton unrolls: the last inputs in the
forward pass, and in the backward pass also the gradients of tokens read by later ones. Products are added to
sums by explicit fused multiply-adds, so that a document has the same bits alone and packed.
"""

# mypy: ignore-errors
# mypy cannot type tuples of Triton values that grow in unrolled loops.

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl


@jit
def _inputs_of(x, row, column, mask, x_stride, channels, GATED: tl.constexpr):
    """The convolution's inputs of a row; with GATED, B * u of B, C and u next to one another."""
    place = x + row.to(tl.int64) * x_stride + column
    value = tl.load(place, mask, 0.0).to(tl.float32)
    if GATED:
        value *= tl.load(place + 2 * channels, mask, 0.0).to(tl.float32)
    return value


@jit
def _inputs_before(x, begin, column, x_stride, channels, TAPS: tl.constexpr, GATED: tl.constexpr):
    """The TAPS - 1 inputs before row `begin`, oldest first."""
    window = ()
    for nth in tl.static_range(TAPS - 1):
        row = begin - (TAPS - 1) + nth
        mask = (row >= 0) & (column < channels)
        window += (_inputs_of(x, row, column, mask, x_stride, channels, GATED),)
    return window


@jit
def _taps_of(weight, column, channels, TAPS: tl.constexpr):
    taps = ()
    for tap in tl.static_range(TAPS):
        taps += (tl.load(weight + column * TAPS + tap, column < channels, 0.0).to(tl.float32),)
    return taps


@jit
def _visible(window, value, position, TAPS: tl.constexpr):
    """Inputs of all taps for a token at `position` of its document: zero before the document."""
    seen = ()
    for nth in tl.static_range(TAPS - 1):
        seen += (tl.where(position >= TAPS - 1 - nth, window[nth], 0.0),)
    seen += (value,)
    return seen


@jit
def _sigmoid(z):
    """As `tl.sigmoid`, in fewer instructions."""
    return 1.0 / (1.0 + tl.exp2(z * -1.4426950408889634))


@jit
def forward_kernel(
    x,
    weight,
    bias,
    starts,
    y,
    x_stride,
    tokens,
    channels,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    begin = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taps = _taps_of(weight, column, channels, TAPS)
    bias_of = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        bias_of += tl.load(bias + column, column < channels, 0.0).to(tl.float32)
    window = _inputs_before(x, begin, column, x_stride, channels, TAPS, GATED)
    for group in range(0, ROWS // GROUP):
        first = begin + group * GROUP
        # Most groups lie within a document: nothing in them needs to be compared.
        if _lies_within(starts, first, first >= TAPS - 1, tokens, TAPS, GROUP):
            window = _group(
                x, starts, y, x_stride, taps, bias_of, window, first, column, tokens, channels,
                True, TAPS, SILU, GATED, GROUP
            )  # fmt: skip
        else:
            window = _group(
                x, starts, y, x_stride, taps, bias_of, window, first, column, tokens, channels,
                False, TAPS, SILU, GATED, GROUP
            )  # fmt: skip


@jit
def _lies_within(starts, first, reaches_back, tokens, TAPS: tl.constexpr, GROUP: tl.constexpr):
    """Whether the GROUP rows from `first` on are tokens of one document, as are TAPS - 1 rows before."""
    inside = reaches_back & (first + GROUP <= tokens)
    if starts is not None:
        start = tl.load(starts + first, first < tokens, 0)
        inside &= tl.load(starts + first + GROUP - 1, first + GROUP <= tokens, 0) == start
        inside &= first - start >= TAPS - 1
    return inside


@jit
def _group(
    x,
    starts,
    y,
    x_stride,
    taps,
    bias_of,
    window,
    first,
    column,
    tokens,
    channels,
    INSIDE: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Go down a group of rows, with INSIDE where `_lies_within`; return the last inputs."""
    values, gates, positions = (), (), ()
    for nth in tl.static_range(GROUP):
        row = first + nth
        mask = column < channels
        if not INSIDE:
            mask &= row < tokens
        values += (_inputs_of(x, row, column, mask, x_stride, channels, GATED),)
        if GATED:
            gate = tl.load(x + row.to(tl.int64) * x_stride + channels + column, mask, 0.0)
            gates += (gate.to(tl.float32),)
        if not INSIDE:
            start = 0
            if starts is not None:
                start = tl.load(starts + row, row < tokens, 0)
            positions += (row - start,)
    for nth in tl.static_range(GROUP):
        row = first + nth
        if INSIDE:
            seen = window + (values[nth],)  # noqa: RUF005
        else:
            seen = _visible(window, values[nth], positions[nth], TAPS)
        z = bias_of
        for tap in tl.static_range(TAPS):
            z = tl.fma(seen[tap], taps[tap], z)
        if SILU:
            z *= _sigmoid(z)
        if GATED:
            z *= gates[nth]
        mask = column < channels
        if not INSIDE:
            mask &= row < tokens
        tl.store(y + row.to(tl.int64) * channels + column, z.to(y.dtype.element_ty), mask)
        moved = ()
        for older in tl.static_range(TAPS - 2):
            moved += (window[older + 1],)
        moved += (values[nth],)
        window = moved
    return window


@jit
def backward_kernel(
    dy,
    x,
    weight,
    bias,
    starts,
    dx,
    sums,
    dy_stride,
    x_stride,
    dx_stride,
    tokens,
    channels,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    begin = tl.program_id(0) * ROWS
    end = tl.minimum(begin + ROWS, tokens)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taps = _taps_of(weight, column, channels, TAPS)
    bias_of = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        bias_of += tl.load(bias + column, column < channels, 0.0).to(tl.float32)
    window = _inputs_before(x, begin, column, x_stride, channels, TAPS, GATED)
    gradients = ()  # gradients so far of the TAPS - 1 rows before the current one
    for _ in tl.static_range(TAPS - 1):
        gradients += (tl.zeros([COLUMNS], tl.float32),)
    added = ()  # this program's sums: one per tap, then the bias
    for _ in tl.static_range(TAPS + 1):
        added += (tl.zeros([COLUMNS], tl.float32),)
    places = dy, x, starts, dx
    strides = dy_stride, x_stride, dx_stride
    # The TAPS - 1 rows after the last also read it.
    for group in range(0, tl.cdiv(end - begin + TAPS - 1, GROUP)):
        first = begin + group * GROUP
        state = window, gradients, added
        own = (group * GROUP >= TAPS - 1) & (first + GROUP <= end)
        if _lies_within(starts, first, own, tokens, TAPS, GROUP):
            state = _group_grads(
                places, strides, taps, bias_of, bias, state, first, column, begin, end, tokens, channels,
                True, TAPS, SILU, GATED, GROUP, COLUMNS
            )  # fmt: skip
        else:
            state = _group_grads(
                places, strides, taps, bias_of, bias, state, first, column, begin, end, tokens, channels,
                False, TAPS, SILU, GATED, GROUP, COLUMNS
            )  # fmt: skip
        window, gradients, added = state
    target = sums + tl.program_id(0).to(tl.int64) * (TAPS + 1) * channels + column
    for nth in tl.static_range(TAPS + 1):
        tl.store(target + nth * channels, added[nth], column < channels)


@jit
def _group_grads(
    places,
    strides,
    taps,
    bias_of,
    bias,
    state,
    first,
    column,
    begin,
    end,
    tokens,
    channels,
    INSIDE: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Go down a group of rows, with INSIDE where `_lies_within`, and the program owns all of these rows."""
    dy, x, starts, dx = places
    dy_stride, x_stride, dx_stride = strides
    window, gradients, added = state
    values, incoming, gates, positions = (), (), (), ()
    grouped = ()  # the group's own sums: a few long sums of short ones round less
    for _ in tl.static_range(TAPS + 1):
        grouped += (tl.zeros([COLUMNS], tl.float32),)
    for nth in tl.static_range(GROUP):
        row = first + nth
        mask = column < channels
        if not INSIDE:
            mask &= row < tokens
        values += (_inputs_of(x, row, column, mask, x_stride, channels, GATED),)
        if GATED:
            gate = tl.load(x + row.to(tl.int64) * x_stride + channels + column, mask, 0.0)
            gates += (gate.to(tl.float32),)
        incoming += (tl.load(dy + row.to(tl.int64) * dy_stride + column, mask, 0.0).to(tl.float32),)
        if not INSIDE:
            start = 0
            if starts is not None:
                start = tl.load(starts + row, row < tokens, 0)
            positions += (row - start,)
    for nth in tl.static_range(GROUP):
        row = first + nth
        if INSIDE:
            seen = window + (values[nth],)  # noqa: RUF005
        else:
            seen = _visible(window, values[nth], positions[nth], TAPS)
        dz = incoming[nth]
        if SILU or GATED:
            z = bias_of
            for tap in tl.static_range(TAPS):
                z = tl.fma(seen[tap], taps[tap], z)
        if GATED:
            place = dx + row.to(tl.int64) * dx_stride + channels + column
            mask = column < channels
            if not INSIDE:
                mask &= row < end
            tl.store(place, (dz * z).to(dx.dtype.element_ty), mask)
            dz *= gates[nth]
        if SILU:
            slope = _sigmoid(z)
            dz *= tl.fma(z, slope * (1 - slope), slope)
        own = dz
        if not INSIDE:
            own = tl.where(row < end, dz, 0.0)
        more, moved, passed = (), (), ()
        for tap in tl.static_range(TAPS):
            more += (tl.fma(own, seen[tap], grouped[tap]),)
        more += (grouped[TAPS] if bias is None else grouped[TAPS] + own,)
        grouped = more
        for older in tl.static_range(TAPS - 1):
            read = dz
            if not INSIDE:
                read = tl.where(positions[nth] >= TAPS - 1 - older, dz, 0.0)
            passed += (tl.fma(read, taps[older], gradients[older]),)
        passed += (dz * taps[TAPS - 1],)
        target = row - (TAPS - 1)
        mask = column < channels
        if not INSIDE:
            mask &= (target >= begin) & (target < end)
        place = dx + target.to(tl.int64) * dx_stride + column
        if GATED:
            before = x + target.to(tl.int64) * x_stride + column
            gate = tl.load(before, mask, 0.0).to(tl.float32)
            u = tl.load(before + 2 * channels, mask, 0.0).to(tl.float32)
            tl.store(place, (passed[0] * u).to(dx.dtype.element_ty), mask)
            tl.store(place + 2 * channels, (passed[0] * gate).to(dx.dtype.element_ty), mask)
        else:
            tl.store(place, passed[0].to(dx.dtype.element_ty), mask)
        kept = ()
        for older in tl.static_range(TAPS - 1):
            kept += (passed[older + 1],)
        gradients = kept
        for older in tl.static_range(TAPS - 2):
            moved += (window[older + 1],)
        moved += (values[nth],)
        window = moved
    more = ()
    for nth in tl.static_range(TAPS + 1):
        more += (added[nth] + grouped[nth],)
    return window, gradients, more
