"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), on packed or separate queries and keys.

The first R of each head's D elements are rotated in pairs by the angle of their position:

    a' = a cos - b sin,  b' = b cos + a sin         pair i: (i, i + R/2), or interleaved: (2 i, 2 i + 1)

The gradient is rotated by the transpose, which also holds if a scaling is multiplied into cos and sin:

    da = da' cos + db' sin,  db = db' cos - da' sin

Multi-axis positions (time, height and width of image patches) change only the tables: `multi_axis_tables`.
Llama 4's complex product is the interleaved form.

Everything is computed in float32 and rounded once. Minimum traffic: queries and keys once in and once out,
plus the values' gradient in the backward pass of the packed form.
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
    """Split packed queries, keys and values, and rotate the queries and keys.

    Args:
        qkv: [T, (num_heads + 2 num_kv_heads) head_dim], queries first, then keys, then values.
        cos, sin: [T, R/2] with R <= head_dim, preferably float32, without gradients; an attention scaling
            (YaRN, LongRoPE) is multiplied into both.
        interleaved: pairing of elements, see above.
        inplace: rotate queries and keys in qkv's storage if the kernel runs. The caller guarantees that qkv
            is not read again; autograd raises if it was saved for a backward pass.

    Returns:
        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], views of packed memory.

    Raises:
        ValueError: incompatible shapes, tables that require gradients, or tensors on different devices.
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
    """Plain twin of `split_rotary_qkv`."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], -2)
    return *rotary_plain(q, k, cos, sin, interleaved), v


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        q, k: [T, heads, D] or [B, S, heads, D], any strides; their numbers of heads may differ.
        cos, sin: [T, R/2], [S, R/2] or [B, S, R/2] with R <= D; see `split_rotary_qkv`.
        interleaved: pairing of elements, see above.

    Returns:
        Rotated q and k, of the same shapes and dtypes, contiguous.

    Raises:
        ValueError: incompatible shapes, tables that require gradients, or tensors on different devices.
    """
    # Tuples: torch.Size takes several times as long to slice and compare.
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)
    alike = q_shape[:-2] == k_shape[:-2] and q_shape[-1:] == k_shape[-1:]
    if len(q_shape) not in (3, 4) or not alike:
        found = f"q is {q_shape} and k {k_shape}"
        raise ValueError(f"{found}; expected [T, heads, D] or [B, S, heads, D], equal except for the heads")
    check_tables(cos, sin, q_shape[:-2], q_shape[-1])
    if use_triton(q, k, cos, sin):
        return _Rotary.apply(q, k, cos, sin, interleaved)
    return as_once_differentiable(*rotary_plain(q, k, cos, sin, interleaved))


def rotary_plain(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain twin of `rotary`."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [..., 1, R/2], the same for every head

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
        wide = at_least_float32(turned)
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)

    return rotate(q), rotate(k)


def multi_axis_tables(
    cos: Tensor, sin: Tensor, sections: Sequence[int], interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Combine the tables of several position axes into one pair (M-RoPE: Qwen2-VL, arXiv:2409.12191, section
    2.1). Each frequency uses one axis.

    Args:
        cos, sin: [A, T, R/2] or [A, B, S, R/2], tables of each of A axes.
        sections: how many of the R/2 frequencies each axis takes.
        interleaved: alternate axes, frequency i using axis i % A, until the axes after the first have all of
            theirs; the first takes the rest (Qwen3-VL, arXiv:2511.21631). Otherwise each axis takes
            consecutive frequencies, in the order of the axes.

    Returns:
        cos, sin without the first dimension, for `rotary` and `split_rotary_qkv`.

    Raises:
        ValueError: the tables' shapes differ, or the sections do not add up to all frequencies.
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
        raise ValueError(f"cos and sin rotate {2 * shape[-1]} elements per head; heads have {head_dim}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos and sin require gradients, which rotary does not compute; detach them")


class _SplitRotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved, inplace):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.interleaved, ctx.dtype = interleaved, qkv.dtype
        ctx.heads, ctx.head_dim = (num_heads, num_kv_heads, num_kv_heads), head_dim
        # Detached, so that autograd sees a write to the storage (the version) but no view to trace.
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
        _rotate((q, k, None), targets, cos, sin, interleaved, transpose=False, target_stride=stride)
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
        _rotate(gradients, targets, cos, sin, ctx.interleaved, transpose=True, target_stride=stride)
        return dqkv.flatten(1), None, None, None, None, None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.interleaved = interleaved
        fresh = _fresh(q), _fresh(k)
        _rotate((q, k, None), (*fresh, None), cos, sin, interleaved, transpose=False)
        return fresh

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        if dq is None and dk is None:
            return (None,) * 5
        cos, sin = ctx.saved_tensors
        fresh = _fresh(dq), _fresh(dk)
        _rotate((dq, dk, None), (*fresh, None), cos, sin, ctx.interleaved, transpose=True)
        return *fresh, None, None, None


def _fresh(x):
    return None if x is None else contiguous_like(x)


def _rotate(sources, targets, cos, sin, interleaved, transpose, target_stride=None):
    """Rotate queries and keys [..., heads, D] into their targets and copy values, in a single launch.

    The sources are queries, keys and values; None where absent. Heads of a target are adjacent, and its
    tokens are `target_stride` elements apart or, by default, adjacent. A target may be its source. Tables of
    fewer than T rows repeat.

    With few tokens, a launch costs more on the host than on the device, and every argument some tenths of a
    microsecond; hence arguments are shared or derived here.
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
        # Numbered along a token's heads first, so that concurrent programs stream through memory.
        _rotate_kernel[(tokens * blocks,)](
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
    its tokens are not evenly spaced, or if `as_heads` copies.
    """
    if x is None:
        return None, 0, None, None
    strides = x.stride()
    if len(strides) == 4 and strides[0] != x.shape[1] * strides[1]:
        x = x.flatten(0, 1)  # copies if necessary
    x = as_heads(x)
    *_, token_stride, head_stride, _ = x.stride()
    return x, x.shape[-2], token_stride, head_stride


def _rows_of_tables(cos, sin):
    """cos and sin, or copies, with contiguous rows; and the stride of the rows, the same for both."""
    strides = cos.stride()
    in_a_row = len(strides) == 2 or strides[0] == cos.shape[1] * strides[1]
    if strides[-1] != 1 or strides != sin.stride() or not in_a_row:
        cos, sin = (table.reshape(-1, table.shape[-1]).contiguous() for table in (cos, sin))
        return cos, sin, cos.shape[1]
    return cos, sin, strides[-2]


# Approximate pairs per program, and warps: 16 pairs a thread, two 16-byte loads of each half in bfloat16.
_TILE = 1024, 2


@jit
def _rotate_kernel(
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
    # Whether a pointer is None is known at compile time, the block is not: hence nested conditions.
    if q is not None:  # noqa: SIM102
        if block < q_blocks:
            q_head = block * BLOCK_HEADS + head
            _rotate_heads(
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
            _rotate_heads(
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
def _rotate_heads(
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
    """Rotate the heads that start at `source` [heads, 1]; a thread reads its pairs before writing them."""
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
