"""Kernels of `qk_norm_rotary.py`: forward, and backward with per-program sums for the weights.

Queries and keys run through the same code in one launch, in tiles of `_head_tiles.py`.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl, wait_for_inputs
from liger_models.kernels.norms._norm_sums import rstd_of
from liger_models.kernels.rotary._head_tiles import (
    group_sum,
    load_heads,
    load_tables,
    load_weight,
    place,
    rotate,
    rounded,
    store_heads,
)


@jit
def forward_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    turned,
    rstd,
    qkv_stride,
    cos_stride,
    sin_stride,
    tokens,
    q_tile_count,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROUND_BETWEEN: tl.constexpr,
    Q_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    tile = tl.program_id(0)
    GROUPS: tl.constexpr = Q_HEADS + K_HEADS if PER_HEAD else 2
    if tile < q_tile_count:
        _forward_tile(
            tile,
            qkv,
            q_weight,
            cos,
            sin,
            turned,
            rstd,
            qkv_stride,
            cos_stride,
            sin_stride,
            tokens,
            eps,
            offset,
            Q_HEADS,
            Q_HEADS + K_HEADS,
            GROUPS,
            HEAD_DIM,
            HALF,
            PER_HEAD,
            NORM_FIRST,
            ROUND_FIRST,
            INTERLEAVED,
            BLOCK_HALF,
            BLOCK_REST,
            ROUND_BETWEEN,
            Q_GROUP,
            Q_ROWS,
        )
    else:
        _forward_tile(
            tile - q_tile_count,
            qkv + Q_HEADS * HEAD_DIM,
            k_weight,
            cos,
            sin,
            turned + Q_HEADS * HEAD_DIM,
            rstd + (Q_HEADS if PER_HEAD else 1),
            qkv_stride,
            cos_stride,
            sin_stride,
            tokens,
            eps,
            offset,
            K_HEADS,
            Q_HEADS + K_HEADS,
            GROUPS,
            HEAD_DIM,
            HALF,
            PER_HEAD,
            NORM_FIRST,
            ROUND_FIRST,
            INTERLEAVED,
            BLOCK_HALF,
            BLOCK_REST,
            ROUND_BETWEEN,
            K_GROUP,
            K_ROWS,
        )


@jit
def _forward_tile(
    tile,
    source,
    weight,
    cos,
    sin,
    target,
    rstd,
    source_stride,
    cos_stride,
    sin_stride,
    tokens,
    eps,
    offset,
    HEADS: tl.constexpr,
    TARGET_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROUND_BETWEEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    dtype = source.dtype.element_ty
    token, head, mask, group, group_mask = place(tile, tokens, HEADS, ROWS, GROUP, PER_HEAD)
    c, s = load_tables(cos + token * cos_stride, sin + token * sin_stride, mask, HALF, BLOCK_HALF)
    start = source + token * source_stride + head * HEAD_DIM
    a, b, r = load_heads(start, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
    if not NORM_FIRST:
        a, b = rotate(a, b, c, s)
        a, b = rounded(a, dtype), rounded(b, dtype)
    WIDTH: tl.constexpr = HEAD_DIM if PER_HEAD else HEADS * HEAD_DIM
    row_rstd = rstd_of(group_sum(a * a, b * b, r * r, REST, ROWS, GROUP), WIDTH, eps)
    tl.store(rstd + token * GROUPS + group, row_rstd, group_mask)
    a, b, r = a * row_rstd, b * row_rstd, r * row_rstd
    if weight is not None:
        if ROUND_FIRST:
            a, b, r = rounded(a, dtype), rounded(b, dtype), rounded(r, dtype)
        wa, wb, wr = load_weight(
            weight, offset, HEADS, HEAD_DIM, HALF, PER_HEAD, INTERLEAVED, ROWS, GROUP, BLOCK_HALF, BLOCK_REST
        )
        a, b, r = a * wa, b * wb, r * wr
    if NORM_FIRST:
        if ROUND_BETWEEN:
            a, b = rounded(a, dtype), rounded(b, dtype)
        a, b = rotate(a, b, c, s)
    start = target + token * (TARGET_HEADS * HEAD_DIM) + head * HEAD_DIM
    store_heads(start, a, b, r, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)


@jit
def backward_kernel(
    dq,
    dk,
    dv,
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    rstd,
    dqkv,
    sums,
    dq_stride,
    dk_stride,
    dv_stride,
    dq_head_stride,
    dk_head_stride,
    dv_head_stride,
    qkv_stride,
    cos_stride,
    sin_stride,
    tokens,
    q_tile_count,
    k_tile_count,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    Q_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    ALL_HEADS: tl.constexpr = Q_HEADS + 2 * K_HEADS
    GROUPS: tl.constexpr = Q_HEADS + K_HEADS if PER_HEAD else 2
    Q_WIDTH: tl.constexpr = HEAD_DIM if PER_HEAD else Q_HEADS * HEAD_DIM
    K_WIDTH: tl.constexpr = HEAD_DIM if PER_HEAD else K_HEADS * HEAD_DIM
    if sums is not None:
        sums += tl.program_id(0).to(tl.int64) * (Q_WIDTH + K_WIDTH)
    _backward_tiles(
        dq,
        qkv,
        q_weight,
        cos,
        sin,
        rstd,
        dqkv,
        sums,
        dq_stride,
        dq_head_stride,
        qkv_stride,
        cos_stride,
        sin_stride,
        tokens,
        q_tile_count,
        offset,
        Q_HEADS,
        ALL_HEADS,
        GROUPS,
        HEAD_DIM,
        HALF,
        PER_HEAD,
        NORM_FIRST,
        ROUND_FIRST,
        INTERLEAVED,
        BLOCK_HALF,
        BLOCK_REST,
        Q_GROUP,
        Q_ROWS,
        STAGES,
    )
    if sums is not None:
        sums += Q_WIDTH
    _backward_tiles(
        dk,
        qkv + Q_HEADS * HEAD_DIM,
        k_weight,
        cos,
        sin,
        rstd + (Q_HEADS if PER_HEAD else 1),
        dqkv + Q_HEADS * HEAD_DIM,
        sums,
        dk_stride,
        dk_head_stride,
        qkv_stride,
        cos_stride,
        sin_stride,
        tokens,
        k_tile_count,
        offset,
        K_HEADS,
        ALL_HEADS,
        GROUPS,
        HEAD_DIM,
        HALF,
        PER_HEAD,
        NORM_FIRST,
        ROUND_FIRST,
        INTERLEAVED,
        BLOCK_HALF,
        BLOCK_REST,
        K_GROUP,
        K_ROWS,
        STAGES,
    )
    if dv is not None:
        column = tl.arange(0, BLOCK_DIM)[None, :]
        target = dqkv + (Q_HEADS + K_HEADS) * HEAD_DIM
        for tile in tl.range(tl.program_id(0), k_tile_count, tl.num_programs(0), num_stages=STAGES):
            token, head, mask, _, _ = place(tile, tokens, K_HEADS, K_ROWS, K_GROUP, PER_HEAD)
            mask = mask & (column < HEAD_DIM)
            value = tl.load(dv + token * dv_stride + head * dv_head_stride + column, mask)
            tl.store(target + token * (ALL_HEADS * HEAD_DIM) + head * HEAD_DIM + column, value, mask)


@jit
def _backward_tiles(
    dy,
    x,
    weight,
    cos,
    sin,
    rstd,
    dx,
    sums,
    dy_stride,
    dy_head_stride,
    x_stride,
    cos_stride,
    sin_stride,
    tokens,
    tiles,
    offset,
    HEADS: tl.constexpr,
    DX_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of this program's share of the queries or keys, and its sums for their weight."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    dtype = x.dtype.element_ty
    WIDTH: tl.constexpr = HEAD_DIM if PER_HEAD else HEADS * HEAD_DIM
    if weight is not None:
        wa, wb, wr = load_weight(
            weight, offset, HEADS, HEAD_DIM, HALF, PER_HEAD, INTERLEAVED, ROWS, GROUP, BLOCK_HALF, BLOCK_REST
        )
    if sums is not None:
        sum_a = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
        sum_b = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
        sum_r = tl.zeros([ROWS, BLOCK_REST], tl.float32)
    if dy is not None:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            token, head, mask, group, group_mask = place(tile, tokens, HEADS, ROWS, GROUP, PER_HEAD)
            start = x + token * x_stride + head * HEAD_DIM
            a, b, r = load_heads(start, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
            start = dy + token * dy_stride + head * dy_head_stride
            ga, gb, gr = load_heads(start, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
            c, s = load_tables(cos + token * cos_stride, sin + token * sin_stride, mask, HALF, BLOCK_HALF)
            row_rstd = tl.load(rstd + token * GROUPS + group, group_mask, 0.0)
            if NORM_FIRST:
                ga, gb = rotate(ga, gb, c, -s)
            else:
                a, b = rotate(a, b, c, s)
                a, b = rounded(a, dtype), rounded(b, dtype)
            a, b, r = a * row_rstd, b * row_rstd, r * row_rstd
            if sums is not None:
                if ROUND_FIRST:
                    sum_a += ga * rounded(a, dtype)
                    sum_b += gb * rounded(b, dtype)
                    sum_r += gr * rounded(r, dtype)
                else:
                    sum_a += ga * a
                    sum_b += gb * b
                    sum_r += gr * r
            if weight is not None:
                ga, gb, gr = ga * wa, gb * wb, gr * wr
            mean = group_sum(ga * a, gb * b, gr * r, REST, ROWS, GROUP) / WIDTH
            ga, gb, gr = (ga - a * mean) * row_rstd, (gb - b * mean) * row_rstd, (gr - r * mean) * row_rstd
            if not NORM_FIRST:
                ga, gb = rotate(ga, gb, c, -s)
            start = dx + token * (DX_HEADS * HEAD_DIM) + head * HEAD_DIM
            store_heads(start, ga, gb, gr, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
    if sums is not None:
        # One row per head that has its own weight.
        sum_a = tl.sum(tl.reshape(sum_a, [ROWS // GROUP, GROUP, BLOCK_HALF]), 0)
        sum_b = tl.sum(tl.reshape(sum_b, [ROWS // GROUP, GROUP, BLOCK_HALF]), 0)
        sum_r = tl.sum(tl.reshape(sum_r, [ROWS // GROUP, GROUP, BLOCK_REST]), 0)
        head = tl.arange(0, GROUP)[:, None]
        start = sums + head * HEAD_DIM
        mask = head * HEAD_DIM < WIDTH
        store_heads(start, sum_a, sum_b, sum_r, mask, HALF, REST, INTERLEAVED, GROUP, BLOCK_HALF, BLOCK_REST)
