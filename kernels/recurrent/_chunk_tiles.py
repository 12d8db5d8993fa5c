"""Tiles of a chunk of 64 tokens, and their inverses, for the kernels of the delta rules and of Mamba 2.

Rows past the end of a document read as zeros, with the last token's running decay, so that differences of
decays cannot overflow.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import ROCM, interpreted, jit, tl, triton


@jit
def segment_size(length, SEGMENT: tl.constexpr, MOST: tl.constexpr):
    """Tokens of a segment of documents of this length: see `_chunk_table.tokens_of_segment`."""
    return SEGMENT * tl.maximum(length // (MOST * SEGMENT), 1)


@jit
def segment_of(segments, count, cu_seqlens):
    """A program's segment, the longest first: its document (-1 if there is no such segment), first token, end
    and first chunk; the document's first token and end; the number of the boundary after the segment.
    """
    nth = tl.load(segments + 4 * count + tl.program_id(2))
    document = tl.load(segments + nth)
    start, end = tl.load(segments + count + nth), tl.load(segments + 2 * count + nth)
    chunk = tl.load(segments + 3 * count + nth).to(tl.int64)
    opening = tl.load(cu_seqlens + tl.maximum(document, 0))
    ending = tl.load(cu_seqlens + tl.maximum(document, 0) + 1)
    return document, start, end, chunk, opening, ending, (nth - document).to(tl.int64)


@jit
def numbers_of(numbers, start, count, head, HEADS: tl.constexpr):
    """One number per token of a chunk: [C], zero from `count` on."""
    row = tl.arange(0, 64)
    return tl.load(numbers + start.to(tl.int64) * HEADS + head + row * HEADS, row < count, 0.0)


@jit
def store_numbers(numbers, values, start, count, head, HEADS: tl.constexpr):
    row = tl.arange(0, 64)
    tl.store(numbers + start.to(tl.int64) * HEADS + head + row * HEADS, values, row < count)


@jit
def _places(stride, start, count, head, column, D: tl.constexpr):
    """Start of a chunk's rows of one head, offsets [C, columns] from there, and the mask of existing rows."""
    row = tl.arange(0, 64)
    # 64 bits for the start only: offsets of a tile occupy registers.
    offsets = row[:, None] * stride + column[None, :]
    return start.to(tl.int64) * stride + head * D, offsets, (row < count)[:, None] & (column < D)[None, :]


@jit
def numbers_of_chunk(numbers, nth):
    """One number per token of a chunk, from [chunks * heads, C]."""
    return tl.load(numbers + nth * 64 + tl.arange(0, 64))


@jit
def store_numbers_of_chunk(numbers, values, nth):
    tl.store(numbers + nth * 64 + tl.arange(0, 64), values)


@jit
def rows_of(x, stride, start, count, head, column, D: tl.constexpr):
    """A chunk's rows of one head: [C, columns]."""
    begin, offsets, mask = _places(stride, start, count, head, column, D)
    return tl.load(x + begin + offsets, mask, 0.0)


@jit
def columns_of(x, tiles, stride, start, count, head, begin, BLOCK: tl.constexpr, D: tl.constexpr):
    """Columns of a chunk's rows of one head: [C, BLOCK]. Through `tiles`, rows past the document's end are
    those of the next one.
    """
    if tiles is not None:
        rows = tiles.load([start, head * D + begin])
    else:
        rows = rows_of(x, stride, start, count, head, begin + tl.arange(0, BLOCK), D)
    return rows


@jit
def square_of(squares, tiles, nth):
    """The 64 x 64 numbers of a chunk and head."""
    if tiles is not None:
        square = tiles.load([(nth * 64).to(tl.int32), 0])
    else:
        row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
        square = tl.load(squares + nth * 4096 + row * 64 + column)
    return square


@jit
def store_rows(x, values, start, count, head, column, HEADS: tl.constexpr, D: tl.constexpr):
    """Write [C, columns] into contiguous [T, HEADS, D]."""
    store_strided_rows(x, values, HEADS * D, start, count, head, column, D)


@jit
def store_strided_rows(x, values, stride, start, count, head, column, D: tl.constexpr):
    """Write [C, columns] into [T, heads, D] whose tokens are `stride` elements apart."""
    begin, offsets, mask = _places(stride, start, count, head, column, D)
    tl.store(x + begin + offsets, values.to(x.dtype.element_ty), mask)


@jit
def store_columns(x, values, stride, start, count, offset, column, D: tl.constexpr):
    """Write the transpose of [columns, C] into a head of [T, heads, D] that is `offset` elements from the
    first, with tokens `stride` elements apart.
    """
    place = start.to(tl.int64) * stride + offset + column[:, None] + tl.arange(0, 64)[None, :] * stride
    live = (column < D)[:, None] & (tl.arange(0, 64) < count)[None, :]
    tl.store(x + place, values.to(x.dtype.element_ty), live)


@jit
def store_state(states, state, square, column, key, DK: tl.constexpr, DV: tl.constexpr):
    """Write columns of the state of number `square` as rows: [columns, BLOCK_K]."""
    place = states + square * DK * DV + column[:, None] * DK + key[None, :]
    tl.store(place, state, (column < DV)[:, None] & (key < DK)[None, :])


@jit
def running_decay(cumulative, start, count, head, HEADS: tl.constexpr):
    """G of a chunk's tokens, constant past the last one, and G of the last."""
    last = tl.load(cumulative + (start + tl.minimum(count, 64) - 1).to(tl.int64) * HEADS + head)
    g = numbers_of(cumulative, start, count, head, HEADS)
    return tl.where(tl.arange(0, 64) < count, g, last), last


@jit
def decay(g_row, g_column, seen):
    """exp(G_row - G_column) where `seen`, else 0; never infinite."""
    return tl.where(seen, tl.exp(tl.where(seen, g_row - g_column, 0.0)), 0.0)


@jit
def log1p(x):
    """log(1 + x), 0 <= x <= 1, without losing a small x."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@jit
def inverse_lengths(rows, l2_eps):
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + l2_eps)


@jit
def _unit_inverses(blocks, PRECISION: tl.constexpr):
    """(1 + A)^-1 of strictly lower blocks A [4, 16, 16], from halves to the whole: with D the inverses of the
    halves and L the part of A below them, it is D - D L D.
    """
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverses = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, blocks, 0.0)
    for level in tl.static_range(1, 4):
        below = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        lower = tl.dot(tl.where(below, blocks, 0.0), inverses, input_precision=PRECISION)
        inverses -= tl.dot(inverses, lower, input_precision=PRECISION)
    return inverses


@jit
def unit_inverse(A, PRECISION: tl.constexpr):
    """(1 + A)^-1 of a strictly lower A [64, 64].

    With D the inverses of 1 + A's blocks on the diagonal and M = D (A below those blocks), it is
    (1 + M)^-1 D = (1 - M) (1 + M^2) D, since M^4 = 0.
    """
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    first, second = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    blocks = tl.sum(tl.where(first == second, tl.reshape(A, [4, 16, 4, 16]), 0.0), 2)
    inverses = _unit_inverses(blocks, PRECISION)
    D = tl.reshape(tl.where(first == second, inverses[:, :, None, :], 0.0), [64, 64])
    M = tl.dot(D, tl.where(row // 16 > column // 16, A, 0.0), input_precision=PRECISION)
    squared = tl.dot(M, M, input_precision=PRECISION)
    inverse = D + tl.dot(squared, D, input_precision=PRECISION)
    return inverse - tl.dot(M, inverse, input_precision=PRECISION)


if triton is not None and not interpreted and not ROCM:

    @jit
    def fetch(numbers, COUNT: tl.constexpr):
        """Fetch COUNT adjacent numbers of 16 bits into the L2 cache, without waiting."""
        line = (numbers + tl.arange(0, COUNT // 64) * 64).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], tl.int32, is_pure=False, pack=1
        )
else:

    @jit
    def fetch(numbers, COUNT: tl.constexpr):
        """Do nothing: a load finds the numbers where they are."""


@jit
def state_rows(states, tiles, square, key, begin, BLOCK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Columns of the state of number `square`, stored as rows: [BLOCK, BLOCK_K]."""
    if tiles is not None:
        state = tiles.load([(square * DV + begin).to(tl.int32), 0])
    else:
        column = begin + tl.arange(0, BLOCK)
        inside = (column < DV)[:, None] & (key < DK)[None, :]
        state = tl.load(states + square * DK * DV + column[:, None] * DK + key[None, :], inside, 0.0)
    return state


@jit
def state_columns(states, offset, key, column, DK: tl.constexpr, DV: tl.constexpr):
    """Columns of a state [dk, dv], transposed: [columns, BLOCK_K]."""
    inside = (column < DV)[:, None] & (key < DK)[None, :]
    return tl.load(states + offset + key[None, :] * DV + column[:, None], inside, 0.0)
