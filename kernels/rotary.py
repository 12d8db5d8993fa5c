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

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    as_heads,
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
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
    return split_rotary_qkv_plain(qkv, cos, sin, num_heads, num_kv_heads, head_dim, interleaved)


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
    alike = q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if q.dim() not in (3, 4) or k.dim() != q.dim() or not alike:
        found = f"q is {tuple(q.shape)} and k {tuple(k.shape)}"
        raise ValueError(f"{found}; expected [T, heads, D] or [B, S, heads, D], alike but for the heads")
    check_tables(cos, sin, q.shape[:-2], q.shape[-1])
    if use_triton(q, k, cos, sin):
        return _Rotary.apply(q, k, cos, sin, interleaved)
    return rotary_plain(q, k, cos, sin, interleaved)


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


def check_tables(cos: Tensor, sin: Tensor, positions: torch.Size, head_dim: int) -> None:
    """Raise ValueError unless cos and sin are tables for these positions and fit a head."""
    if cos.shape != sin.shape or cos.shape[:-1] not in (positions, positions[-1:]):
        found = f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise ValueError(f"{found}; expected {[*positions, 'R/2']} for both")
    if not 0 < 2 * cos.shape[-1] <= head_dim:
        raise ValueError(f"cos and sin turn {2 * cos.shape[-1]} elements a head; heads have {head_dim}")
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
        _turn(((q, q_out), (k, k_out), (None, None)), cos, sin, interleaved, transpose=False)
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
        _turn(zip(gradients, targets, strict=True), cos, sin, ctx.interleaved, transpose=True)
        return dqkv.flatten(1), None, None, None, None, None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.interleaved = interleaved
        return _turn_fresh(q, k, cos, sin, interleaved, transpose=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        if dq is None and dk is None:
            return (None,) * 5
        cos, sin = ctx.saved_tensors
        return *_turn_fresh(dq, dk, cos, sin, ctx.interleaved, transpose=True), None, None, None


def _turn_fresh(q, k, cos, sin, interleaved, transpose):
    """Turn q and k [..., heads, D] into fresh memory; None stays None."""
    q_out, k_out = _contiguous_like(q), _contiguous_like(k)
    cos, sin = (table if table.dim() == 2 else table.flatten(0, 1) for table in (cos, sin))
    pairs = ((_in_a_row(q), q_out), (_in_a_row(k), k_out), (None, None))
    _turn(pairs, cos, sin, interleaved, transpose)
    return q_out, k_out


def _contiguous_like(x):
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def _in_a_row(x):
    """x if its tokens lie in a row, as those of [T, heads, D] do and of [B, S, heads, D] may; else a copy."""
    if x is None or x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1):
        return x
    return x.flatten(0, 1)  # a copy where it has to be one


def _turn(pairs, cos, sin, interleaved, transpose):
    """Turn queries and keys [..., heads, D] into their targets and copy values, all in one launch.

    `pairs` are (source, target) of queries, keys and values; the source is None where one is absent. Tokens
    of sources and targets lie in a row, and the heads of a target side by side; other strides are any. A
    target may be its source. Tables of fewer than T rows repeat.
    """
    sources, targets, heads, token_strides, head_strides, target_strides = zip(
        *(_operands(source, target) for source, target in pairs), strict=True
    )
    *lead, _, head_dim = next(x.shape for x in sources if x is not None)
    tokens = math.prod(lead)
    if not tokens:
        return
    cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in (cos, sin))
    half = cos.shape[1]
    block_half = next_power_of_2(half)
    tile, num_warps = _TILE
    block_heads = max(1, min(tile // block_half, next_power_of_2(max(heads))))
    in_place = any(x is not None and x is y for x, y in zip(sources, targets, strict=True))
    rest = 0 if in_place else head_dim - 2 * half
    with on_device_of(cos):
        # Numbered along a token's heads first, so that programs that run together stream through memory.
        _turn_kernel[(tokens * sum(ceil_div(count, block_heads) for count in heads),)](
            *sources,
            *targets,
            cos,
            sin,
            *token_strides,
            *head_strides,
            *target_strides,
            cos.stride(0),
            sin.stride(0),
            cos.shape[0],
            *heads,
            HEAD_DIM=head_dim,
            HALF=half,
            REST=rest,
            INTERLEAVED=interleaved,
            TRANSPOSE=transpose,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            BLOCK_DIM=next_power_of_2(head_dim),
            num_warps=num_warps,
        )


def _operands(source, target):
    """source, target, heads, and the strides of the source's tokens and heads and of the target's tokens."""
    if source is None:
        return None, None, 0, 0, 0, 0
    source = as_heads(source)
    *_, token_stride, head_stride, _ = source.stride()
    return source, target, source.shape[-2], token_stride, head_stride, target.stride(-3)


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
    q_out_stride,
    k_out_stride,
    v_out_stride,
    cos_stride,
    sin_stride,
    table_rows,
    q_heads,
    k_heads,
    v_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS)
    k_end = q_blocks + tl.cdiv(k_heads, BLOCK_HEADS)
    blocks = k_end + tl.cdiv(v_heads, BLOCK_HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    row = token % table_rows
    c = tl.load(cos + row * cos_stride + pair, pair < HALF, 0.0).to(tl.float32)
    s = tl.load(sin + row * sin_stride + pair, pair < HALF, 0.0).to(tl.float32)
    if TRANSPOSE:
        s = -s
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    # Whether a pointer is None is known when compiling, the block is not: hence one condition inside another.
    if q is not None:  # noqa: SIM102
        if block < q_blocks:
            q_head = block * BLOCK_HEADS + head
            _turn_heads(
                q + token * q_stride + q_head * q_head_stride,
                q_out + token * q_out_stride + q_head * HEAD_DIM,
                c,
                s,
                q_head < q_heads,
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
                k_out + token * k_out_stride + k_head * HEAD_DIM,
                c,
                s,
                k_head < k_heads,
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
            target = v_out + token * v_out_stride + v_head * HEAD_DIM
            _copy(source, target, v_head < v_heads, HEAD_DIM, BLOCK_DIM)


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
