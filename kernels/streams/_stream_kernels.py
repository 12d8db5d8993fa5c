"""Triton kernels of `streams.py`. A program processes one token.

Vectors of N streams, and matrices, are padded to NS, a power of two; what is padded is zero.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl


@jit
def weighted_forward_kernel(
    streams,
    y,
    base,
    scale,
    rstd,
    summed,
    post,
    mixture,
    width,
    iterations,
    eps,
    norm_eps,
    magnitude,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    NS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the weights of a token, and its streams' weighted sum."""
    token = tl.program_id(0).to(tl.int64)
    streams += token * N * width
    i = tl.arange(0, NS)
    squares = tl.zeros([NS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        x = _load_streams(streams, start, width, N, NS, BLOCK)
        squares += x * x
    r = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / (N * width) + norm_eps)
    tl.store(rstd + token, r)
    pre = tl.sigmoid(_logits(y, base, scale, r, token, 0, PARTS, N, NS)) + eps
    if PARTS > 1:
        weights = magnitude * tl.sigmoid(_logits(y, base, scale, r, token, 1, PARTS, N, NS))
        tl.store(post + token * N + i, weights + (eps if PARTS == 2 else 0.0), i < N)
    if PARTS == 3:
        matrix, _ = _first_matrix(y, base, scale, r, token, eps, N, NS)
        matrix = _normalised(matrix, iterations, eps)
        _store_matrix(mixture + token * N * N, matrix, N, NS)
    for start in range(0, width, BLOCK):
        x = _load_streams(streams, start, width, N, NS, BLOCK)
        _store_columns(summed + token * width, tl.sum(x * pre[:, None], 0), start, width, BLOCK)


@jit
def weighted_backward_kernel(
    streams,
    y,
    base,
    scale,
    rstd,
    dsummed,
    dpost,
    dmixture,
    dstreams,
    dlogits,
    width,
    iterations,
    eps,
    magnitude,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    NS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of a token's logits, and of its streams but for that through the products y."""
    token = tl.program_id(0).to(tl.int64)
    streams += token * N * width
    dstreams += token * N * width
    dsummed += token * width
    i = tl.arange(0, NS)
    ROWS: tl.constexpr = N * (2 + N) if PARTS == 3 else N * PARTS
    dlogits += token * ROWS
    products = tl.zeros([NS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        x = _load_streams(streams, start, width, N, NS, BLOCK)
        products += x * _load_columns(dsummed, start, width, BLOCK)[None, :]
    r = tl.load(rstd + token)
    share = tl.sigmoid(_logits(y, base, scale, r, token, 0, PARTS, N, NS))
    found = tl.where(i < N, tl.sum(products, 1) * share * (1.0 - share), 0.0)
    tl.store(dlogits + i, found, i < N)
    y_row = y + token * ROWS
    # Sum of the gradients of the logits times their slope by 1 / rms.
    slope = tl.sum(found * tl.load(y_row + i, i < N, 0.0), 0) * tl.load(scale)
    pre = share + eps
    if PARTS > 1:
        share = tl.sigmoid(_logits(y, base, scale, r, token, 1, PARTS, N, NS))
        found = tl.load(dpost + token * N + i, i < N, 0.0) * magnitude * share * (1.0 - share)
        tl.store(dlogits + N + i, found, i < N)
        slope += tl.sum(found * tl.load(y_row + N + i, i < N, 0.0), 0) * tl.load(scale + 1)
    if PARTS == 3:
        matrix, shares = _first_matrix(y, base, scale, r, token, eps, N, NS)
        dmatrix = _load_matrix(dmixture + token * N * N, N, NS)
        # Each iteration is made again from the first one, so that none is kept.
        for before in range(1, iterations):
            columns = _normalised(matrix, iterations - before, eps)
            rows = columns / (tl.sum(columns, 1)[:, None] + eps)
            sums = tl.sum(rows, 0)[None, :] + eps
            dmatrix = (dmatrix - tl.sum(dmatrix * (rows / sums), 0)[None, :]) / sums
            sums = tl.sum(columns, 1)[:, None] + eps
            dmatrix = (dmatrix - tl.sum(dmatrix * rows, 1)[:, None]) / sums
        sums = tl.sum(matrix, 0)[None, :] + eps
        dmatrix = (dmatrix - tl.sum(dmatrix * (matrix / sums), 0)[None, :]) / sums
        dmatrix = shares * (dmatrix - tl.sum(dmatrix * shares, 1)[:, None])
        _store_matrix(dlogits + 2 * N, dmatrix, N, NS)
        slope += tl.sum(tl.sum(dmatrix * _load_matrix(y_row + 2 * N, N, NS), 1), 0) * tl.load(scale + 2)
    factor = slope * r * r * r / (N * width)
    for start in range(0, width, BLOCK):
        x = _load_streams(streams, start, width, N, NS, BLOCK)
        gradient = pre[:, None] * _load_columns(dsummed, start, width, BLOCK)[None, :] - factor * x
        _store_streams(dstreams, gradient, start, width, N, NS, BLOCK)


@jit
def mixed_forward_kernel(
    streams,
    branch,
    post,
    mixture,
    also,
    out,
    width,
    MIXED: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    MS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute M sums of N streams of a token, and of the branch and `also` where there are any."""
    token = tl.program_id(0).to(tl.int64)
    i, column = tl.arange(0, MS), tl.arange(0, BLOCK)
    streams += token * N * width
    out += token * M * width
    for start in range(0, width, BLOCK):
        total = tl.zeros([MS, BLOCK], tl.float32)
        if branch is not None:
            weights = tl.load(post + token * M + i, i < M, 0.0).to(tl.float32)
            total += weights[:, None] * _load_columns(branch + token * width, start, width, BLOCK)[None, :]
        if also is not None:
            more = _load_columns(also + token * width, start, width, BLOCK)
            total += tl.where(i[:, None] > 0, more[None, :], 0.0)
        if MIXED:
            for source in tl.static_range(N):
                row = tl.load(mixture + (token * N + source) * M + i, i < M, 0.0).to(tl.float32)
                x = tl.load(streams + source * width + start + column, start + column < width, 0.0)
                total += row[:, None] * x.to(tl.float32)[None, :]
        else:
            total += _load_streams(streams, start, width, M, MS, BLOCK)
        _store_streams(out, total, start, width, M, MS, BLOCK)


@jit
def mixed_backward_kernel(
    streams,
    branch,
    post,
    mixture,
    dout,
    dstreams,
    dbranch,
    dpost,
    dmixture,
    dalso,
    width,
    MIXED: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    MS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i, column = tl.arange(0, MS), tl.arange(0, BLOCK)
    dout += token * M * width
    if MIXED:
        streams += token * N * width
        dstreams += token * N * width
    of_post = tl.zeros([MS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        own = _load_streams(dout, start, width, M, MS, BLOCK)
        if branch is not None:
            weights = tl.load(post + token * M + i, i < M, 0.0).to(tl.float32)
            of_post += own * _load_columns(branch + token * width, start, width, BLOCK)[None, :]
            total = tl.sum(own * weights[:, None], 0)
            _store_columns(dbranch + token * width, total, start, width, BLOCK)
        if dalso is not None:
            total = tl.sum(tl.where(i[:, None] > 0, own, 0.0), 0)
            _store_columns(dalso + token * width, total, start, width, BLOCK)
        if MIXED:
            inside = start + column < width
            for source in tl.static_range(N):
                row = tl.load(mixture + (token * N + source) * M + i, i < M, 0.0).to(tl.float32)
                total = tl.sum(own * row[:, None], 0)
                places = dstreams + source * width + start + column
                tl.store(places, total.to(dstreams.dtype.element_ty), inside)
    if branch is not None:
        tl.store(dpost + token * M + i, tl.sum(of_post, 1), i < M)
    if MIXED:
        for source in tl.static_range(N):
            products = tl.zeros([MS, BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                x = tl.load(streams + source * width + start + column, start + column < width, 0.0)
                products += _load_streams(dout, start, width, M, MS, BLOCK) * x.to(tl.float32)[None, :]
            tl.store(dmixture + (token * N + source) * M + i, tl.sum(products, 1), i < M)


@jit
def _logits(y, base, scale, r, token, part, PARTS: tl.constexpr, N: tl.constexpr, NS: tl.constexpr):
    """The logits of one weight per stream: part 0 for the sum, part 1 for the branch's output."""
    ROWS: tl.constexpr = N * (2 + N) if PARTS == 3 else N * PARTS
    i = tl.arange(0, NS)
    found = tl.load(y + token * ROWS + part * N + i, i < N, 0.0) * r * tl.load(scale + part)
    return found + tl.load(base + part * N + i, i < N, 0.0)


@jit
def _first_matrix(y, base, scale, r, token, eps, N: tl.constexpr, NS: tl.constexpr):
    """Softmax of the mixture's logits over rows, plus eps, and without."""
    i, j = tl.arange(0, NS)[:, None], tl.arange(0, NS)[None, :]
    inside = (i < N) & (j < N)
    place = 2 * N + i * N + j
    logits = tl.load(y + token * (N * (2 + N)) + place, inside, 0.0) * r * tl.load(scale + 2)
    logits += tl.load(base + place, inside, 0.0)
    logits = tl.where(j < N, logits, -float("inf"))
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    shares = tl.where(inside, powers / tl.sum(powers, 1)[:, None], 0.0)
    return tl.where(inside, shares + eps, 0.0), shares


@jit
def _normalised(matrix, iterations, eps):
    """The matrix after so many iterations; the first one divides columns alone."""
    matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    for _ in range(1, iterations):
        matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    return matrix


@jit
def _load_matrix(start, N: tl.constexpr, NS: tl.constexpr):
    i, j = tl.arange(0, NS)[:, None], tl.arange(0, NS)[None, :]
    return tl.load(start + i * N + j, (i < N) & (j < N), 0.0).to(tl.float32)


@jit
def _store_matrix(start, matrix, N: tl.constexpr, NS: tl.constexpr):
    i, j = tl.arange(0, NS)[:, None], tl.arange(0, NS)[None, :]
    tl.store(start + i * N + j, matrix, (i < N) & (j < N))


@jit
def _load_streams(start, first, width, N: tl.constexpr, NS: tl.constexpr, BLOCK: tl.constexpr):
    i, column = tl.arange(0, NS)[:, None], first + tl.arange(0, BLOCK)[None, :]
    return tl.load(start + i * width + column, (i < N) & (column < width), 0.0).to(tl.float32)


@jit
def _store_streams(start, x, first, width, N: tl.constexpr, NS: tl.constexpr, BLOCK: tl.constexpr):
    i, column = tl.arange(0, NS)[:, None], first + tl.arange(0, BLOCK)[None, :]
    tl.store(start + i * width + column, x.to(start.dtype.element_ty), (i < N) & (column < width))


@jit
def _load_columns(start, first, width, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    return tl.load(start + column, column < width, 0.0).to(tl.float32)


@jit
def _store_columns(start, x, first, width, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    tl.store(start + column, x.to(start.dtype.element_ty), column < width)
