"""Kernels of the short convolution: each program goes down the tokens of a few channels.

Values needed by the next token stay in registers, in tuples that Triton unrolls: the last inputs in the
forward pass, and in the backward pass also the gradients of tokens read by later ones. Products are added to
sums by explicit fused multiply-adds, so that a document has the same bits alone and packed.
"""

# mypy: ignore-errors
# mypy cannot type tuples of Triton values that grow in unrolled loops.

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels._fast_math import sigmoid


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
            z *= sigmoid(z)
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
    STAGES: tl.constexpr,
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
    last_start = 0  # of the document of the last row that is read
    if starts is not None:
        last_start = tl.load(starts + tl.minimum(begin + ROWS + TAPS - 2, tokens - 1))
    # The TAPS - 1 rows after the last also read it.
    for group in tl.range(0, tl.cdiv(end - begin + TAPS - 1, GROUP), num_stages=STAGES):
        first = begin + group * GROUP
        loaded = _group_inputs(
            dy, x, dy_stride, x_stride, first, column, tokens, channels, TAPS, GATED, GROUP
        )
        own = (group * GROUP >= TAPS - 1) & (first + GROUP <= end)
        inside = own & (first - last_start >= TAPS - 1)
        if starts is not None:  # noqa: SIM102
            # Only where documents end is there something to load, and to wait for.
            if own & (inside == 0):
                inside = _lies_within(starts, first, own, tokens, TAPS, GROUP)
        state = window, gradients, added
        if inside:
            state = _group_grads(
                starts, dx, dx_stride, taps, bias_of, bias, state, loaded, first, column, begin, end, tokens,
                channels, True, TAPS, SILU, GATED, GROUP, COLUMNS
            )  # fmt: skip
        else:
            state = _group_grads(
                starts, dx, dx_stride, taps, bias_of, bias, state, loaded, first, column, begin, end, tokens,
                channels, False, TAPS, SILU, GATED, GROUP, COLUMNS
            )  # fmt: skip
        window, gradients, added = state
    target = sums + tl.program_id(0).to(tl.int64) * (TAPS + 1) * channels + column
    for nth in tl.static_range(TAPS + 1):
        tl.store(target + nth * channels, added[nth], column < channels)


@jit
def _group_inputs(
    dy,
    x,
    dy_stride,
    x_stride,
    first,
    column,
    tokens,
    channels,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """All that the gradients of a group of rows read."""
    dy += first.to(tl.int64) * dy_stride + column
    x += first.to(tl.int64) * x_stride + column
    rows, incoming, gates, inner, earlier, earlier_inner = (), (), (), (), (), ()
    for nth in tl.static_range(GROUP):
        mask = (column < channels) & (first + nth < tokens)
        rows += (tl.load(x + nth * x_stride, mask, 0.0),)
        incoming += (tl.load(dy + nth * dy_stride, mask, 0.0),)
        if GATED:
            gates += (tl.load(x + nth * x_stride + channels, mask, 0.0),)
            inner += (tl.load(x + nth * x_stride + 2 * channels, mask, 0.0),)
            target = nth - (TAPS - 1)
            before = (column < channels) & (first + target >= 0) & (first + target < tokens)
            earlier += (tl.load(x + target * x_stride, before, 0.0),)
            earlier_inner += (tl.load(x + target * x_stride + 2 * channels, before, 0.0),)
    return rows, incoming, gates, inner, earlier, earlier_inner


@jit
def _group_grads(
    starts,
    dx,
    dx_stride,
    taps,
    bias_of,
    bias,
    state,
    loaded,
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
    window, gradients, added = state
    rows, incoming, gates, inner, earlier, earlier_inner = loaded
    grouped = ()  # the group's own sums: a few long sums of short ones round less
    for _ in tl.static_range(TAPS + 1):
        grouped += (tl.zeros([COLUMNS], tl.float32),)
    dx += first.to(tl.int64) * dx_stride + column
    for nth in tl.static_range(GROUP):
        row = first + nth
        value = rows[nth].to(tl.float32)
        if GATED:
            value *= inner[nth].to(tl.float32)
        if INSIDE:
            seen = window + (value,)  # noqa: RUF005
        else:
            start = 0
            if starts is not None:
                start = tl.load(starts + row, row < tokens, 0)
            position = row - start
            seen = _visible(window, value, position, TAPS)
        dz = incoming[nth].to(tl.float32)
        if SILU or GATED:
            z = bias_of
            for tap in tl.static_range(TAPS):
                z = tl.fma(seen[tap], taps[tap], z)
        if GATED:
            mask = column < channels
            if not INSIDE:
                mask &= row < end
            tl.store(dx + nth * dx_stride + channels, (dz * z).to(dx.dtype.element_ty), mask)
            dz *= gates[nth].to(tl.float32)
        if SILU:
            slope = sigmoid(z)
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
                read = tl.where(position >= TAPS - 1 - older, dz, 0.0)
            passed += (tl.fma(read, taps[older], gradients[older]),)
        passed += (dz * taps[TAPS - 1],)
        target = row - (TAPS - 1)
        mask = column < channels
        if not INSIDE:
            mask &= (target >= begin) & (target < end)
        place = dx + (nth - (TAPS - 1)) * dx_stride
        if GATED:
            tl.store(place, (passed[0] * earlier_inner[nth].to(tl.float32)).to(dx.dtype.element_ty), mask)
            place += 2 * channels
            tl.store(place, (passed[0] * earlier[nth].to(tl.float32)).to(dx.dtype.element_ty), mask)
        else:
            tl.store(place, passed[0].to(dx.dtype.element_ty), mask)
        kept = ()
        for older in tl.static_range(TAPS - 1):
            kept += (passed[older + 1],)
        gradients = kept
        for older in tl.static_range(TAPS - 2):
            moved += (window[older + 1],)
        moved += (value,)
        window = moved
    more = ()
    for nth in tl.static_range(TAPS + 1):
        more += (added[nth] + grouped[nth],)
    return window, gradients, more
