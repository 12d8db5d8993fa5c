"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), on packed or separate queries and keys.

Of each head's D elements the first R are taken in pairs, each turned by its position's angle:

    a' = a cos - b sin,  b' = b cos + a sin         pair i: (i, i + R/2), or interleaved: (2 i, 2 i + 1)

The gradient is turned back by the transpose, which is right also if a scaling is multiplied into cos and sin:

    da = da' cos + db' sin,  db = db' cos - da' sin

Positions of several axes (time, height and width of an image's patches) change the tables alone:
`multi_axis_tables`. Llama 4's product of complex numbers is the interleaved form.

All is computed in float32 and rounded once. Bytes moved at the least: queries and keys once in and once out,
and with them, in the backward pass of the packed form, the gradient of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_heads,
    as_once_differentiable,
    at_least_float32,
    ceil_div,
    contiguous_like,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)


def split_rotary_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed queries, keys and values, and turn the queries and keys.

    Args:
        qkv: [T, (num_heads + 2 num_kv_heads) head_dim], queries first, then keys, then values.
        cos, sin: [T, R/2] with R <= head_dim, float32 advised, no gradients; a scaling of attention (YaRN,
            LongRoPE) is multiplied into both.
        interleaved: which elements form a pair, see above.
        inplace: turn queries and keys inside qkv's storage where the kernel runs. The caller promises that
            nobody reads qkv again; autograd raises if somebody kept it for a backward pass.

    Returns:
        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], views of packed memory.

    Raises:
        ValueError: shapes that do not fit, tables that require gradients, or tensors on several devices.
    """
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        heads = f"({num_heads} + 2 * {num_kv_heads}) heads of {head_dim}"
        raise ValueError(f"qkv is {tuple(qkv.shape)}; expected [T, {width}] for {heads}")
    check_tables(cos, sin, qkv.shape[:1], head_dim)
    if use_triton(qkv, cos, sin):
        return _SplitRotaryQKV.apply(qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved, inplace)
    return as_once_differentiable(
        *split_rotary_qkv_plain(qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved)
    )


def split_rotary_qkv_plain(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning of `split_rotary_qkv`, in plain PyTorch."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], -2)
    return *rotary_plain(q, k, cos, sin, interleaved), v


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys.

    Args:
        q, k: [T, heads, D] or [B, S, heads, D], any strides; their counts of heads may differ.
        cos, sin: [T, R/2] or [S, R/2] or [B, S, R/2] with R <= D; see `split_rotary_qkv`.
        interleaved: which elements form a pair, see above.

    Returns:
        q and k turned, of the same shapes and dtypes, contiguous.

    Raises:
        ValueError: shapes that do not fit, tables that require gradients, or tensors on several devices.
    """
    # Tuples, since torch's sizes take several times as long to be sliced and compared.
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)
    alike = q_shape[:-2] == k_shape[:-2] and q_shape[-1:] == k_shape[-1:]
    if len(q_shape) not in (3, 4) or not alike:
        found = f"q is {q_shape} and k {k_shape}"
        raise ValueError(f"{found}; expected [T, heads, D] or [B, S, heads, D], alike but for the heads")
    check_tables(cos, sin, q_shape[:-2], q_shape[-1])
    if use_triton(q, k, cos, sin):
        return _Rotary.apply(q, k, cos, sin, interleaved)
    return as_once_differentiable(*rotary_plain(q, k, cos, sin, interleaved))


def rotary_plain(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The meaning of `rotary`, in plain PyTorch."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [..., 1, R/2], the same for every head

    def turn(x: Tensor) -> Tensor:
        turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
        wide = at_least_float32(turned)
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)

    return turn(q), turn(k)


def multi_axis_tables(
    cos: Tensor, sin: Tensor, sections: Sequence[int], interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """One pair of tables out of those of several axes of position (M-RoPE: Qwen2-VL, arXiv:2409.12191,
    section 2.1). Each frequency turns by one axis.

    Args:
        cos, sin: [A, T, R/2] or [A, B, S, R/2], the tables of each of A axes by itself.
        sections: how many of the R/2 frequencies each axis takes.
        interleaved: the axes take turns, frequency i going to axis i % A, until those after the first have
            had their share; the first takes all that is left (Qwen3-VL, arXiv:2511.21631). Otherwise each
            axis takes its frequencies in a row, in the order of the axes.

    Returns:
        cos, sin without the first dimension, for `rotary` and `split_rotary_qkv`.

    Raises:
        ValueError: the tables' shapes differ, or the sections do not share out all frequencies.
    """
    axes, half = cos.shape[0], cos.shape[-1]
    if cos.shape != sin.shape or len(sections) != axes or sum(sections) != half:
        found = f"cos is {tuple(cos.shape)}, sin {tuple(sin.shape)} and sections {list(sections)}"
        raise ValueError(
            f"{found}; expected tables [{len(sections)}, ..., {sum(sections)}] for these sections"
        )
    frequency = torch.arange(half, device=cos.device)  # [R/2]
    merged_cos, merged_sin = cos[0], sin[0]
    for axis in range(1, axes):
        if interleaved:
            own = (frequency % axes == axis) & (frequency < axes * sections[axis])
        else:
            own = (frequency >= sum(sections[:axis])) & (frequency < sum(sections[: axis + 1]))
        merged_cos = torch.where(own, cos[axis], merged_cos)
        merged_sin = torch.where(own, sin[axis], merged_sin)
    return merged_cos, merged_sin


def check_tables(cos: Tensor, sin: Tensor, positions: tuple[int, ...], head_dim: int) -> None:
    """Raise ValueError unless cos and sin are tables for these positions and fit a head."""
    shape = tuple(cos.shape)
    if shape != sin.shape or shape[:-1] not in (positions, positions[-1:]):
        found = f"cos is {shape} and sin {tuple(sin.shape)}"
        raise ValueError(f"{found}; expected {[*positions, 'R/2']} for both")
    if not 0 < 2 * shape[-1] <= head_dim:
        raise ValueError(f"cos and sin turn {2 * shape[-1]} elements a head; heads have {head_dim}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos and sin require gradients, which rotary does not compute; detach them")


class _SplitRotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved, inplace):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.interleaved, ctx.dtype = interleaved, qkv.dtype
        ctx.heads, ctx.head_dim = (num_heads, num_kv_heads, num_kv_heads), head_dim
        # Detached, so that autograd sees a write into storage (the version) but no view to trace.
        q, k, v = qkv.detach().unflatten(1, (-1, head_dim)).split_with_sizes(ctx.heads, 1)
        rows_lie_apart = qkv.stride(1) == 1 and qkv.stride(0) >= qkv.shape[1]
        if inplace and rows_lie_apart:
            q_out, k_out = q, k
            if not qkv.is_inference():
                torch.autograd.graph.increment_version(qkv)
        else:
            fresh = qkv.new_empty(qkv.shape[0], num_heads + num_kv_heads, head_dim)
            q_out, k_out = fresh.split_with_sizes(ctx.heads[:2], 1)
        targets, stride = (q_out, k_out, None), q_out.stride(0)
        _turn((q, k, None), targets, cos, sin, interleaved, transpose=False, target_stride=stride)
        return q_out, k_out, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            return (None,) * 8
        cos, sin = ctx.saved_tensors
        tokens, heads = cos.shape[0], sum(ctx.heads)
        dqkv = torch.empty(tokens, heads, ctx.head_dim, dtype=ctx.dtype, device=cos.device)
        targets = dqkv.split_with_sizes(ctx.heads, 1)
        for gradient, target in zip(gradients, targets, strict=True):
            if gradient is None:
                target.zero_()
        stride = dqkv.stride(0)
        _turn(gradients, targets, cos, sin, ctx.interleaved, transpose=True, target_stride=stride)
        return dqkv.flatten(1), None, None, None, None, None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.interleaved = interleaved
        fresh = _fresh(q), _fresh(k)
        _turn((q, k, None), (*fresh, None), cos, sin, interleaved, transpose=False)
        return fresh

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        if dq is None and dk is None:
            return (None,) * 5
        cos, sin = ctx.saved_tensors
        fresh = _fresh(dq), _fresh(dk)
        _turn((dq, dk, None), (*fresh, None), cos, sin, ctx.interleaved, transpose=True)
        return *fresh, None, None, None


def _fresh(x):
    return None if x is None else contiguous_like(x)


def _turn(sources, targets, cos, sin, interleaved, transpose, target_stride=None):
    """Turn queries and keys [..., heads, D] into their targets and copy values, all in one launch.

    The sources are queries, keys and values; None where one is absent. Heads of a target lie side by side
    and its tokens `target_stride` elements apart, or, without that, in a row. A target may be its source.
    Tables of fewer than T rows repeat.

    A launch costs the host more than it costs the device if there are few tokens, and every argument some
    tenths of a microsecond, hence what is shared or derived here.
    """
    q, k, v = sources
    q_out, k_out, v_out = targets
    *lead, _, head_dim = (q if q is not None else k if k is not None else v).shape
    tokens = lead[0] if len(lead) == 1 else lead[0] * lead[1]
    q, q_heads, q_stride, q_head_stride = _rows_of_heads(q)
    k, k_heads, k_stride, k_head_stride = _rows_of_heads(k)
    v, v_heads, v_stride, v_head_stride = _rows_of_heads(v)
    if not tokens:
        return
    half = cos.shape[-1]
    table_rows = tokens if cos.dim() > 2 else cos.shape[0]
    cos, sin, table_stride = _rows_of_tables(cos, sin)
    block_half = next_power_of_2(half)
    tile, num_warps = _TILE
    block_heads = max(1, min(tile // block_half, next_power_of_2(max(q_heads, k_heads, v_heads))))
    blocks = ceil_div(q_heads, block_heads) + ceil_div(k_heads, block_heads) + ceil_div(v_heads, block_heads)
    in_place = q_out is q and k_out is k
    with on_device_of(cos):
        # Numbered along a token's heads first, so that programs that run together stream through memory.
        _turn_kernel[(tokens * blocks,)](
            q,
            k,
            v,
            q_out,
            k_out,
            v_out,
            cos,
            sin,
            q_stride,
            k_stride,
            v_stride,
            q_head_stride,
            k_head_stride,
            v_head_stride,
            target_stride,
            table_stride,
            table_rows,
            q_heads,
            k_heads,
            v_heads,
            head_dim,
            half,
            0 if in_place else head_dim - 2 * half,
            interleaved,
            transpose,
            block_heads,
            block_half,
            next_power_of_2(head_dim),
            num_warps=num_warps,
        )


def _rows_of_heads(x):
    """x [T, heads, D] or [B, S, heads, D], its heads, and the strides of its tokens and heads; a copy of x if
    its tokens do not lie in a row or for what `as_heads` copies.
    """
    if x is None:
        return None, 0, None, None
    strides = x.stride()
    if len(strides) == 4 and strides[0] != x.shape[1] * strides[1]:
        x = x.flatten(0, 1)  # a copy where it has to be one
    x = as_heads(x)
    *_, token_stride, head_stride, _ = x.stride()
    return x, x.shape[-2], token_stride, head_stride


def _rows_of_tables(cos, sin):
    """cos and sin, or copies, with rows that lie in a row; and the stride of the rows, the same for both."""
    strides = cos.stride()
    in_a_row = len(strides) == 2 or strides[0] == cos.shape[1] * strides[1]
    if strides[-1] != 1 or strides != sin.stride() or not in_a_row:
        cos, sin = (table.reshape(-1, table.shape[-1]).contiguous() for table in (cos, sin))
        return cos, sin, cos.shape[1]
    return cos, sin, strides[-2]


# Pairs a program, about, and its warps: 16 pairs a thread, in bfloat16 two loads of 16 bytes of each half.
_TILE = 1024, 2


@jit
def _turn_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
    cos,
    sin,
    q_stride,
    k_stride,
    v_stride,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    target_stride,
    table_stride,
    table_rows,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    q_blocks = tl.cdiv(Q_HEADS, BLOCK_HEADS)
    k_end = q_blocks + tl.cdiv(K_HEADS, BLOCK_HEADS)
    blocks = k_end + tl.cdiv(V_HEADS, BLOCK_HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    row = token % table_rows
    c = tl.load(cos + row * table_stride + pair, pair < HALF, 0.0).to(tl.float32)
    s = tl.load(sin + row * table_stride + pair, pair < HALF, 0.0).to(tl.float32)
    if TRANSPOSE:
        s = -s
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    # Whether a pointer is None is known when compiling, the block is not: hence one condition inside another.
    if q is not None:  # noqa: SIM102
        if block < q_blocks:
            q_head = block * BLOCK_HEADS + head
            _turn_heads(
                q + token * q_stride + q_head * q_head_stride,
                q_out + token * _stride_or(target_stride, Q_HEADS * HEAD_DIM) + q_head * HEAD_DIM,
                c,
                s,
                q_head < Q_HEADS,
                HALF,
                REST,
                INTERLEAVED,
                BLOCK_HEADS,
                BLOCK_HALF,
                BLOCK_DIM,
            )
    if k is not None:  # noqa: SIM102
        if (block >= q_blocks) & (block < k_end):
            k_head = (block - q_blocks) * BLOCK_HEADS + head
            _turn_heads(
                k + token * k_stride + k_head * k_head_stride,
                k_out + token * _stride_or(target_stride, K_HEADS * HEAD_DIM) + k_head * HEAD_DIM,
                c,
                s,
                k_head < K_HEADS,
                HALF,
                REST,
                INTERLEAVED,
                BLOCK_HEADS,
                BLOCK_HALF,
                BLOCK_DIM,
            )
    if v is not None:  # noqa: SIM102
        if block >= k_end:
            v_head = (block - k_end) * BLOCK_HEADS + head
            source = v + token * v_stride + v_head * v_head_stride
            target = v_out + token * _stride_or(target_stride, V_HEADS * HEAD_DIM) + v_head * HEAD_DIM
            _copy(source, target, v_head < V_HEADS, HEAD_DIM, BLOCK_DIM)


@jit
def _stride_or(stride, OTHERWISE: tl.constexpr):
    return OTHERWISE if stride is None else stride


@jit
def _turn_heads(
    source,
    target,
    c,
    s,
    mask,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Turn the heads that start at `source` [heads, 1]; a thread reads its pairs before it writes them."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    dtype = target.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both_mask = mask & (both < 2 * HALF)
        x = tl.load(source + both, both_mask, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_HALF, 2]))
        x = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BLOCK_HEADS, 2 * BLOCK_HALF])
        tl.store(target + both, x.to(dtype), both_mask)
    else:
        pair_mask = mask & (pair < HALF)
        a = tl.load(source + pair, pair_mask, 0.0).to(tl.float32)
        b = tl.load(source + HALF + pair, pair_mask, 0.0).to(tl.float32)
        tl.store(target + pair, (a * c - b * s).to(dtype), pair_mask)
        tl.store(target + HALF + pair, (b * c + a * s).to(dtype), pair_mask)
    if REST > 0:
        _copy(source + 2 * HALF, target + 2 * HALF, mask, REST, BLOCK_DIM)


@jit
def _copy(source, target, mask, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = mask & (column < WIDTH)
    tl.store(target + column, tl.load(source + column, mask), mask)
