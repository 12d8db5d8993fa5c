"""Tiles of attention heads: addressing, loading, rotation, sums and stores.

A tile is ROWS heads, one per row, in three parts: `a` and `b` [ROWS, BLOCK_HALF], the two sides of the
rotated pairs, and `r` [ROWS, BLOCK_REST], the elements left unchanged. GROUP rows are normalised together:
one, or a token's heads, padded to a power of two.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl


@jit
def place(tile, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr):
    """Token and head of each row of a tile and the mask of existing rows; the same for the normalised groups.

    If heads of one token fill the tile, the token is a scalar.
    """
    row = tl.arange(0, ROWS)[:, None]
    if PER_HEAD:
        first = tl.cast(tile, tl.int64) * ROWS
        token = first // HEADS
        head = (first % HEADS).to(tl.int32) + row
        if HEADS % ROWS == 0:
            mask = row < ROWS
        else:
            token = token + head // HEADS
            head = head % HEADS
            mask = token < tokens
        group = head
        group_mask = mask
    elif ROWS == GROUP:
        token = tl.cast(tile, tl.int64)
        head = row
        mask = head < HEADS
        group = tl.arange(0, 1)[:, None]
        group_mask = group < 1
    else:
        token = tl.cast(tile, tl.int64) * (ROWS // GROUP) + row // GROUP
        head = row % GROUP
        mask = (head < HEADS) & (token < tokens)
        group = tl.zeros([ROWS, 1], tl.int32)
        group_mask = mask
    return token, head, mask, group, group_mask


@jit
def load_tables(cos, sin, mask, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rows of the tables starting at `cos` and `sin`: one for the tile, or one per head."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    if cos.shape == mask.shape:
        inside = mask & (pair < HALF)
    else:
        inside = pair < HALF
    c = tl.load(cos + pair, inside, 0.0).to(tl.float32)
    s = tl.load(sin + pair, inside, 0.0).to(tl.float32)
    return c, s


@jit
def load_weight(
    weight,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """offset + weight, in one row for all heads or one row per head."""
    COUNT: tl.constexpr = 1 if PER_HEAD else HEADS
    BLOCK: tl.constexpr = 1 if PER_HEAD else ROWS
    head = tl.arange(0, BLOCK)[:, None] % GROUP
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    start = weight + head * HEAD_DIM
    a, b, r = load_heads(start, head < COUNT, HALF, REST, INTERLEAVED, BLOCK, BLOCK_HALF, BLOCK_REST)
    return a + offset, b + offset, r + offset


@jit
def load_heads(
    start,
    mask,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Load the heads at `start` [ROWS, 1] in float32: both sides of all pairs, and the unrotated rest."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        x = tl.load(start + both, mask & (both < 2 * HALF), 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [ROWS, BLOCK_HALF, 2]))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        a = tl.load(start + pair, mask & (pair < HALF), 0.0).to(tl.float32)
        b = tl.load(start + HALF + pair, mask & (pair < HALF), 0.0).to(tl.float32)
    if REST > 0:
        column = tl.arange(0, BLOCK_REST)[None, :]
        r = tl.load(start + 2 * HALF + column, mask & (column < REST), 0.0).to(tl.float32)
    else:
        r = tl.zeros([ROWS, BLOCK_REST], tl.float32)
    return a, b, r


@jit
def store_heads(
    start,
    a,
    b,
    r,
    mask,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    dtype = start.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        x = tl.reshape(tl.join(a, b), [ROWS, 2 * BLOCK_HALF])
        tl.store(start + both, x.to(dtype), mask & (both < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        tl.store(start + pair, a.to(dtype), mask & (pair < HALF))
        tl.store(start + HALF + pair, b.to(dtype), mask & (pair < HALF))
    if REST > 0:
        column = tl.arange(0, BLOCK_REST)[None, :]
        tl.store(start + 2 * HALF + column, r.to(dtype), mask & (column < REST))


@jit
def rotate(a, b, c, s):
    return a * c - b * s, b * c + a * s


@jit
def rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@jit
def group_sum(a, b, r, REST: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Sum over each normalised group: [ROWS, 1], or [1, 1] if the group is the whole tile."""
    total = tl.sum(a + b, 1, keep_dims=True)
    if REST > 0:
        total += tl.sum(r, 1, keep_dims=True)
    if GROUP > 1:
        total = tl.sum(tl.reshape(total, [ROWS // GROUP, GROUP]), 1, keep_dims=True)
        if ROWS > GROUP:
            total = tl.reshape(tl.broadcast_to(total, [ROWS // GROUP, GROUP]), [ROWS, 1])
    return total
