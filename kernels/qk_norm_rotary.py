"""Query/key norm and rotary in one pass over packed queries, keys and values.

For each of queries and keys, with x a head's elements (Qwen 3, arXiv:2505.09388, section 2) or those of all
heads (OLMo 2, arXiv:2501.00656, section 3.2), and R the turn of `rotary.py`, head by head:

    norm first:     y = R(n * s),   n = x * rstd,       s = offset + weight,  rstd = 1 / sqrt(mean(x^2) + eps)
    norm last:      y = n * s,      n = R(x) * rstd,    rstd of R(x)

    gradients:      g = R^T dy (norm last: dy)
                    dweight = sum over tokens (and heads, if they share the weight) of g * n
                    dn = g * s,     dx = (dn - n * mean(dn * n)) * rstd     (norm last: R^T of that)

Bytes moved at the least, for a token's q, k and v of b bytes each: forward 2 (q + k), backward
3 (q + k) + 2 v. Kept for the backward pass are only qkv, which the projection made, and rstd.

A tile is a few heads, which stay in registers, or all heads of a token if they are normalised together. The
forward kernel gives a tile to each program. In the backward pass a fixed number of programs stride over the
tiles, each with its own sums for the weights; a second kernel adds those up in a fixed order, so that
gradients are the same bits in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    as_rows,
    ceil_div,
    jit,
    next_power_of_2,
    num_sms,
    on_device_of,
    tl,
    use_triton,
)
from liger_models.kernels._norm_kernels import _column_sum_kernel, _rstd
from liger_models.kernels.rms_norm import rms_norm_plain
from liger_models.kernels.rotary import _check_tables, rotary_plain


def split_norm_rotary_qkv(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    eps: float,
    offset: float = 0.0,
    cast: str = "llama",
    per_head: bool = True,
    norm_first: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed queries, keys and values; normalise and turn the queries and keys.

    Args:
        qkv: [T, (num_heads + 2 num_kv_heads) head_dim], queries first, then keys, then values.
        q_weight, k_weight: the norms' weights, of one dtype: [head_dim] each if `per_head`, else
            [num_heads head_dim] and [num_kv_heads head_dim]. None for both: no weights (Llama 4).
        cos, sin: [T, R/2] with R <= head_dim, as in `split_rotary_qkv`.
        eps, offset, cast: as in `rms_norm`.
        per_head: normalise each head by itself (Qwen 3, Gemma 3), or all heads together (OLMo 2).
        norm_first: normalise before turning, or after (Hunyuan, Llama 4).
        interleaved: which elements form a pair, as in `rotary`.

    Returns:
        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], in qkv's dtype. v is a view of qkv.

    Raises:
        ValueError: shapes that do not fit, tables that require gradients, an unknown `cast`, one weight
            without the other, an offset without weights, or tensors on several devices.
    """
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        packed = f"({num_heads} + 2 * {num_kv_heads}) heads of {head_dim}"
        raise ValueError(f"qkv is {tuple(qkv.shape)}; expected [T, {width}] for {packed}")
    _check_tables(cos, sin, qkv.shape[:1], head_dim)
    widths = [head_dim * (1 if per_head else count) for count in (num_heads, num_kv_heads)]
    _check_weights(q_weight, k_weight, widths, offset, cast)
    heads = num_heads, num_kv_heads, head_dim
    if use_triton(qkv, q_weight, k_weight, cos, sin):
        flags = per_head, norm_first, interleaved
        return _SplitNormRotaryQKV.apply(
            qkv, q_weight, k_weight, cos, sin, heads, eps, offset, cast == "llama", flags
        )
    return split_norm_rotary_qkv_plain(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        *heads,
        eps=eps,
        offset=offset,
        cast=cast,
        per_head=per_head,
        norm_first=norm_first,
        interleaved=interleaved,
    )


def split_norm_rotary_qkv_plain(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    eps: float,
    offset: float = 0.0,
    cast: str = "llama",
    per_head: bool = True,
    norm_first: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning of `split_norm_rotary_qkv`, in plain PyTorch."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], -2)

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if per_head:
            return rms_norm_plain(x, weight, eps, offset, cast)
        return rms_norm_plain(x.flatten(-2), weight, eps, offset, cast).view(x.shape)

    if norm_first:
        q, k = rotary_plain(norm(q, q_weight), norm(k, k_weight), cos, sin, interleaved)
    else:
        q, k = rotary_plain(q, k, cos, sin, interleaved)
        q, k = norm(q, q_weight), norm(k, k_weight)
    # A weight wider than the activations promotes the norm's result; attention wants q, k and v alike.
    return q.to(qkv.dtype), k.to(qkv.dtype), v


def _check_weights(
    q_weight: Tensor | None, k_weight: Tensor | None, widths: list[int], offset: float, cast: str
) -> None:
    if cast not in ("llama", "gemma", "float32"):
        raise ValueError(f"cast is {cast!r}; expected 'llama', 'gemma' or 'float32'")
    if q_weight is None or k_weight is None:
        if q_weight is not k_weight:
            raise ValueError("one of q_weight and k_weight is None; expected both or neither")
        if offset:
            raise ValueError(f"offset is {offset} but there are no weights to add it to")
        return
    found = [tuple(q_weight.shape), tuple(k_weight.shape)]
    if found != [(width,) for width in widths] or q_weight.dtype != k_weight.dtype:
        given = f"q_weight is {found[0]} in {q_weight.dtype}, k_weight {found[1]} in {k_weight.dtype}"
        raise ValueError(f"{given}; expected ({widths[0]},) and ({widths[1]},) in one dtype")


class _SplitNormRotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, heads, eps, offset, round_first, flags):
        num_heads, num_kv_heads, head_dim = heads
        per_head, norm_first, interleaved = flags
        tokens = qkv.shape[0]
        weights = [None if weight is None else weight.contiguous() for weight in (q_weight, k_weight)]
        cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in (cos, sin))
        # As in `rms_norm`, "llama" gives the promoted dtype: then nothing is rounded before the turn.
        promotes = weights[0] is not None and torch.promote_types(qkv.dtype, weights[0].dtype) != qkv.dtype
        options = {
            "Q_HEADS": num_heads,
            "K_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF": cos.shape[1],
            "PER_HEAD": per_head,
            "NORM_FIRST": norm_first,
            "ROUND_FIRST": round_first,
            "INTERLEAVED": interleaved,
            "BLOCK_HALF": next_power_of_2(cos.shape[1]),
            "BLOCK_REST": next_power_of_2(max(1, head_dim - 2 * cos.shape[1])),
        }
        turned = qkv.new_empty(tokens, num_heads + num_kv_heads, head_dim)
        rstd_shape = (tokens, num_heads + num_kv_heads if per_head else 2)
        rstd = torch.empty(rstd_shape, dtype=torch.float32, device=qkv.device)
        if tokens:
            rows = as_rows(qkv)
            q_rows, k_rows, num_warps = _forward_config(heads, per_head)
            q_tiles = _tiles(tokens, num_heads, q_rows, per_head)
            k_tiles = _tiles(tokens, num_kv_heads, k_rows, per_head)
            with on_device_of(qkv):
                _forward_kernel[(q_tiles + k_tiles,)](
                    rows,
                    *weights,
                    cos,
                    sin,
                    turned,
                    rstd,
                    rows.stride(0),
                    cos.stride(0),
                    sin.stride(0),
                    tokens,
                    q_tiles,
                    eps,
                    offset,
                    **options,
                    ROUND_BETWEEN=not (round_first and promotes),
                    Q_ROWS=q_rows,
                    K_ROWS=k_rows,
                    num_warps=num_warps,
                )
        ctx.save_for_backward(qkv, *weights, cos, sin, rstd)
        ctx.set_materialize_grads(False)
        ctx.heads, ctx.offset, ctx.per_head, ctx.options = heads, offset, per_head, options
        q, k = turned.split([num_heads, num_kv_heads], 1)
        # Detached, so that autograd makes no view of qkv out of what this function gives a gradient.
        v = qkv.detach()[:, -num_kv_heads * head_dim :].unflatten(1, (num_kv_heads, head_dim))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            return (None,) * 10
        qkv, *weights, cos, sin, rstd = ctx.saved_tensors
        num_heads, num_kv_heads, head_dim = ctx.heads
        tokens = qkv.shape[0]
        heads = num_heads, num_kv_heads, num_kv_heads
        dqkv = torch.empty(tokens, sum(heads), head_dim, dtype=qkv.dtype, device=qkv.device)
        for gradient, target in zip(gradients, dqkv.split(heads, 1), strict=True):
            if gradient is None:
                target.zero_()
        want_dweights = any(ctx.needs_input_grad[1:3])
        widths = [0 if weight is None else weight.shape[0] for weight in weights]
        dweights = weights[0].new_zeros(sum(widths)) if want_dweights else None
        if tokens:
            _launch_backward(ctx, gradients, qkv, weights, cos, sin, rstd, dqkv, dweights)
        by_weight = (None, None) if dweights is None else dweights.split(widths)
        return dqkv.flatten(1), *by_weight, None, None, None, None, None, None, None


def _launch_backward(ctx, gradients, qkv, weights, cos, sin, rstd, dqkv, dweights):
    sources = [x if x is None or x.stride(2) == 1 else x.contiguous() for x in gradients]
    rows = as_rows(qkv)
    q_rows, k_rows, num_warps, per_sm, stages = _backward_config(
        ctx.heads, ctx.per_head, ctx.options["NORM_FIRST"]
    )
    q_tiles = _tiles(rows.shape[0], ctx.heads[0], q_rows, ctx.per_head)
    k_tiles = _tiles(rows.shape[0], ctx.heads[1], k_rows, ctx.per_head)
    programs = min(q_tiles, num_sms(rows) * per_sm)
    sums = None if dweights is None else rstd.new_empty(programs, dweights.shape[0])
    with on_device_of(rows):
        _backward_kernel[(programs,)](
            *sources,
            rows,
            *weights,
            cos,
            sin,
            rstd,
            dqkv,
            sums,
            *(0 if x is None else x.stride(0) for x in sources),
            *(0 if x is None else x.stride(1) for x in sources),
            rows.stride(0),
            cos.stride(0),
            sin.stride(0),
            rows.shape[0],
            q_tiles,
            k_tiles,
            ctx.offset,
            **ctx.options,
            Q_ROWS=q_rows,
            K_ROWS=k_rows,
            BLOCK_DIM=next_power_of_2(ctx.heads[2]),
            STAGES=stages,
            num_warps=num_warps,
        )
        if sums is not None:
            width = sums.shape[1]
            grid = (ceil_div(width, 64),)
            _column_sum_kernel[grid](sums, dweights, programs, width, BLOCK_ROWS=64, BLOCK_WIDTH=64)


def _forward_config(heads: tuple[int, int, int], per_head: bool) -> tuple[int, int, int]:
    """Heads a tile of queries, heads a tile of keys, and warps."""
    num_heads, num_kv_heads, head_dim = heads
    width = next_power_of_2(head_dim)
    if per_head:  # about 2048 elements, as in rotary: two loads of 16 bytes a thread of each half
        rows = max(1, 2048 // width)
        return rows, rows, 2
    q_rows, k_rows = next_power_of_2(num_heads), next_power_of_2(num_kv_heads)
    return q_rows, k_rows, min(16, max(2, max(q_rows, k_rows) * width // 1024))


def _backward_config(
    heads: tuple[int, int, int], per_head: bool, norm_first: bool
) -> tuple[int, int, int, int, int]:
    """Heads a tile of queries and of keys, warps, programs a multiprocessor, stages of the loads' pipeline.

    The limit is registers, as in `_norm_kernels.py`, whose configurations these are: at 128 a thread, 512
    threads fit a multiprocessor. A tile with heads of several tokens holds a row of the tables for each, and
    a norm that comes last needs them before and after it: such tiles have to be half as large.
    """
    num_heads, num_kv_heads, head_dim = heads
    width = next_power_of_2(head_dim)
    if per_head:
        most = max(1, 4096 // width)
        half = max(1, most // 2)
        whole = [norm_first and count % most == 0 for count in (num_heads, num_kv_heads)]
        q_rows, k_rows = (most if fits else half for fits in whole)
        return q_rows, k_rows, 4, 4, 1
    q_rows, k_rows = next_power_of_2(num_heads), next_power_of_2(num_kv_heads)
    elements = max(q_rows, k_rows) * width
    if elements <= 4096:
        return q_rows, k_rows, 8, 2, 3
    return q_rows, k_rows, 16, 1, 3 if elements <= 8192 else 1


def _tiles(tokens: int, heads: int, rows: int, per_head: bool) -> int:
    return ceil_div(tokens * heads, rows) if per_head else tokens


@jit
def _forward_kernel(
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
    q_tiles,
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
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
):
    tile = tl.program_id(0)
    GROUPS: tl.constexpr = Q_HEADS + K_HEADS if PER_HEAD else 2
    if tile < q_tiles:
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
            Q_ROWS,
        )
    else:
        _forward_tile(
            tile - q_tiles,
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
    ROWS: tl.constexpr,
):
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    dtype = source.dtype.element_ty
    token, head, mask, group, group_mask = _place(tile, tokens, HEADS, ROWS, PER_HEAD)
    c, s = _load_tables(cos + token * cos_stride, sin + token * sin_stride, mask, HALF, BLOCK_HALF)
    start = source + token * source_stride + head * HEAD_DIM
    a, b, r = _load_heads(start, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
    if not NORM_FIRST:
        a, b = _turn(a, b, c, s)
        a, b = _rounded(a, dtype), _rounded(b, dtype)
    WIDTH: tl.constexpr = HEAD_DIM if PER_HEAD else HEADS * HEAD_DIM
    row_rstd = _rstd(_group_sum(a * a, b * b, r * r, REST, PER_HEAD), WIDTH, eps)
    tl.store(rstd + token * GROUPS + group, row_rstd, group_mask)
    a, b, r = a * row_rstd, b * row_rstd, r * row_rstd
    if weight is not None:
        if ROUND_FIRST:
            a, b, r = _rounded(a, dtype), _rounded(b, dtype), _rounded(r, dtype)
        wa, wb, wr = _load_weight(
            weight, offset, HEADS, HEAD_DIM, HALF, PER_HEAD, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST
        )
        a, b, r = a * wa, b * wb, r * wr
    if NORM_FIRST:
        if ROUND_BETWEEN:
            a, b = _rounded(a, dtype), _rounded(b, dtype)
        a, b = _turn(a, b, c, s)
    start = target + token * (TARGET_HEADS * HEAD_DIM) + head * HEAD_DIM
    _store_heads(start, a, b, r, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)


@jit
def _backward_kernel(
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
    q_tiles,
    k_tiles,
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
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        q_tiles,
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
        k_tiles,
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
        K_ROWS,
        STAGES,
    )
    if dv is not None:
        column = tl.arange(0, BLOCK_DIM)[None, :]
        target = dqkv + (Q_HEADS + K_HEADS) * HEAD_DIM
        for tile in tl.range(tl.program_id(0), k_tiles, tl.num_programs(0), num_stages=STAGES):
            token, head, mask, _, _ = _place(tile, tokens, K_HEADS, K_ROWS, PER_HEAD)
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
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of this program's share of the queries, or of the keys, and its sums for their weight."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    dtype = x.dtype.element_ty
    WIDTH: tl.constexpr = HEAD_DIM if PER_HEAD else HEADS * HEAD_DIM
    if weight is not None:
        wa, wb, wr = _load_weight(
            weight, offset, HEADS, HEAD_DIM, HALF, PER_HEAD, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST
        )
    if sums is not None:
        sum_a = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
        sum_b = tl.zeros([ROWS, BLOCK_HALF], tl.float32)
        sum_r = tl.zeros([ROWS, BLOCK_REST], tl.float32)
    if dy is not None:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
            token, head, mask, group, group_mask = _place(tile, tokens, HEADS, ROWS, PER_HEAD)
            start = x + token * x_stride + head * HEAD_DIM
            a, b, r = _load_heads(start, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
            start = dy + token * dy_stride + head * dy_head_stride
            ga, gb, gr = _load_heads(start, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
            c, s = _load_tables(cos + token * cos_stride, sin + token * sin_stride, mask, HALF, BLOCK_HALF)
            row_rstd = tl.load(rstd + token * GROUPS + group, group_mask, 0.0)
            if NORM_FIRST:
                ga, gb = _turn(ga, gb, c, -s)
            else:
                a, b = _turn(a, b, c, s)
                a, b = _rounded(a, dtype), _rounded(b, dtype)
            a, b, r = a * row_rstd, b * row_rstd, r * row_rstd
            if sums is not None:
                if ROUND_FIRST:
                    sum_a += ga * _rounded(a, dtype)
                    sum_b += gb * _rounded(b, dtype)
                    sum_r += gr * _rounded(r, dtype)
                else:
                    sum_a += ga * a
                    sum_b += gb * b
                    sum_r += gr * r
            if weight is not None:
                ga, gb, gr = ga * wa, gb * wb, gr * wr
            mean = _group_sum(ga * a, gb * b, gr * r, REST, PER_HEAD) / WIDTH
            ga, gb, gr = (ga - a * mean) * row_rstd, (gb - b * mean) * row_rstd, (gr - r * mean) * row_rstd
            if not NORM_FIRST:
                ga, gb = _turn(ga, gb, c, -s)
            start = dx + token * (DX_HEADS * HEAD_DIM) + head * HEAD_DIM
            _store_heads(start, ga, gb, gr, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST)
    if sums is not None:
        if PER_HEAD:
            sum_a, sum_b = tl.sum(sum_a, 0, keep_dims=True), tl.sum(sum_b, 0, keep_dims=True)
            sum_r = tl.sum(sum_r, 0, keep_dims=True)
            head = tl.arange(0, 1)[:, None]
            _store_heads(
                sums + head, sum_a, sum_b, sum_r, head < 1, HALF, REST, INTERLEAVED, 1, BLOCK_HALF, BLOCK_REST
            )
        else:
            head = tl.arange(0, ROWS)[:, None]
            start = sums + head * HEAD_DIM
            mask = head < HEADS
            _store_heads(
                start, sum_a, sum_b, sum_r, mask, HALF, REST, INTERLEAVED, ROWS, BLOCK_HALF, BLOCK_REST
            )


@jit
def _place(tile, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr, PER_HEAD: tl.constexpr):
    """Token and head of each row of a tile, and which rows exist; the groups that are normalised, likewise.

    The token is one for the whole tile where heads of one token fill it.
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
    else:
        token = tl.cast(tile, tl.int64)
        head = row
        mask = head < HEADS
        group = tl.arange(0, 1)[:, None]
        group_mask = group < 1
    return token, head, mask, group, group_mask


@jit
def _load_tables(cos, sin, mask, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rows of the tables, which start at `cos` and `sin`: one for the tile, or one a head."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    if cos.shape == mask.shape:
        inside = mask & (pair < HALF)
    else:
        inside = pair < HALF
    c = tl.load(cos + pair, inside, 0.0).to(tl.float32)
    s = tl.load(sin + pair, inside, 0.0).to(tl.float32)
    return c, s


@jit
def _load_weight(
    weight,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """offset + weight, in one row for every head, or in a row of its own for each."""
    COUNT: tl.constexpr = 1 if PER_HEAD else HEADS
    BLOCK: tl.constexpr = 1 if PER_HEAD else ROWS
    head = tl.arange(0, BLOCK)[:, None]
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    start = weight + head * HEAD_DIM
    a, b, r = _load_heads(start, head < COUNT, HALF, REST, INTERLEAVED, BLOCK, BLOCK_HALF, BLOCK_REST)
    return a + offset, b + offset, r + offset


@jit
def _load_heads(
    start,
    mask,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The heads at `start` [ROWS, 1], in float32: both sides of all pairs, and what is not turned."""
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
def _store_heads(
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
def _turn(a, b, c, s):
    return a * c - b * s, b * c + a * s


@jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@jit
def _group_sum(a, b, r, REST: tl.constexpr, PER_HEAD: tl.constexpr):
    """The sum over what is normalised together, in shape [ROWS, 1] or [1, 1]."""
    total = tl.sum(a + b, 1, keep_dims=True)
    if REST > 0:
        total += tl.sum(r, 1, keep_dims=True)
    if not PER_HEAD:
        total = tl.sum(total, 0, keep_dims=True)
    return total
