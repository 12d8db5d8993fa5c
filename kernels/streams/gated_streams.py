"""Several residual streams of a token with gates by channel (Qwen4, 2026): their gated mean, and the sum with
a branch's output.

    y = mean_j sigmoid(L_j) N_j            of the normalised streams N_j, and logits L_j
    X'_j = X_j + b_j f                     of the streams X_j, the branch's output f, and a weight b_j each

    dL_j = dy N_j s_j (1 - s_j) / n,   dN_j = dy s_j / n,   s_j = sigmoid(L_j)
    df = sum_j b_j dX'_j,   db_j = dX'_j . f,   dX_j = dX'_j

Computed in float32 and rounded once. Bytes of a token with n streams of b bytes each: of the mean 2 n b and b
forward, 4 n b and b backward; of the sum 2 n b and b, n b and 2 b. Saved are the operands, but not X.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)


def gated_mean(logits: Tensor, normed: Tensor, count: int) -> Tensor:
    """The mean of streams times the sigmoid of their logits.

    Args:
        logits, normed: [T, n H], any floating dtype.
        count: the number of streams n.

    Returns:
        [T, H] in the dtype of `normed`.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.shape != normed.shape or normed.dim() != 2 or normed.shape[1] % count:
        raise ValueError(
            f"found logits {tuple(logits.shape)} and streams {tuple(normed.shape)}; expected [T, {count} H] "
            "of both"
        )
    out: Tensor = _GatedMean.apply(logits, normed, count)
    return out


def gated_mean_plain(logits: Tensor, normed: Tensor, count: int) -> Tensor:
    """Plain twin of `gated_mean`."""
    pairs = zip(logits.chunk(count, 1), normed.chunk(count, 1), strict=True)
    total: Any = sum(at_least_float32(gate).sigmoid() * at_least_float32(x) for gate, x in pairs)
    return (total / count).to(normed.dtype)


def added_to_streams(streams: Tensor, branch: Tensor, weights: Tensor) -> Tensor:
    """Add a branch's output to streams, with a weight for each.

    Args:
        streams: [T, n H], any floating dtype.
        branch: [T, H].
        weights: [T, n].

    Returns:
        [T, n H] in the streams' dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, count = weights.shape
    if branch.shape[0] != tokens or streams.shape != (tokens, count * branch.shape[1]):
        raise ValueError(
            f"found streams {tuple(streams.shape)}, branch {tuple(branch.shape)} and weights "
            f"{tuple(weights.shape)}; expected [T, n H], [T, H] and [T, n]"
        )
    out: Tensor = _Added.apply(streams, branch, weights)
    return out


def added_to_streams_plain(streams: Tensor, branch: Tensor, weights: Tensor) -> Tensor:
    """Plain twin of `added_to_streams`."""
    terms = at_least_float32(weights)[..., None] * at_least_float32(branch)[:, None]
    return (at_least_float32(streams) + terms.flatten(1)).to(streams.dtype)


class _GatedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, normed: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(logits, normed)
        ctx.count = count
        if not use_triton(logits, normed):
            return gated_mean_plain(logits, normed, count)
        logits, normed = logits.contiguous(), normed.contiguous()
        tokens, width = len(normed), normed.shape[1] // count
        out = normed.new_empty(tokens, width)
        if out.numel():
            block, grid = _tiles(tokens, width)
            with on_device_of(normed):
                gated_mean_kernel[grid](logits, normed, out, width, N=count, BLOCK=block, num_warps=4)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        (logits, normed), count = ctx.saved_tensors, ctx.count
        if not use_triton(logits, normed, dout):
            share = at_least_float32(logits).sigmoid()
            each = at_least_float32(dout).repeat(1, count) / count
            dlogits = each * at_least_float32(normed) * share * (1 - share)
            return dlogits.to(logits.dtype), (each * share).to(normed.dtype), None
        logits, normed, dout = logits.contiguous(), normed.contiguous(), dout.contiguous()
        dlogits, dnormed = torch.empty_like(logits), torch.empty_like(normed)
        if dout.numel():
            block, grid = _tiles(*dout.shape)
            with on_device_of(normed):
                gated_mean_backward_kernel[grid](
                    *(logits, normed, dout, dlogits, dnormed, dout.shape[1]),
                    **{"N": count, "BLOCK": block, "num_warps": 4},
                )
        return dlogits, dnormed, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, branch: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(branch, weights)
        ctx.dtype = streams.dtype
        if not use_triton(streams, branch, weights):
            return added_to_streams_plain(streams, branch, weights)
        streams, branch, weights = (x.contiguous() for x in (streams, branch, weights))
        out, (tokens, width) = torch.empty_like(streams), branch.shape
        if out.numel():
            block, grid = _tiles(tokens, width)
            with on_device_of(streams):
                added_kernel[grid](
                    *(streams, branch, weights, out, width),
                    **{"N": weights.shape[1], "BLOCK": block, "num_warps": 4},
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        branch, weights = ctx.saved_tensors
        count = weights.shape[1]
        if not use_triton(branch, weights, dout):
            own = at_least_float32(dout).unflatten(1, (count, -1))
            dbranch = (own * at_least_float32(weights)[..., None]).sum(1)
            dweights = (own * at_least_float32(branch)[:, None]).sum(-1)
            return dout.to(ctx.dtype), dbranch.to(branch.dtype), dweights.to(weights.dtype)
        branch, weights, dout = branch.contiguous(), weights.contiguous(), dout.contiguous()
        dbranch, dweights = torch.empty_like(branch), torch.empty_like(weights)
        if len(branch):
            width = branch.shape[1]
            with on_device_of(branch):
                added_backward_kernel[(len(branch),)](
                    *(branch, weights, dout, dbranch, dweights, width),
                    **{"N": count, "NS": next_power_of_2(count), "BLOCK": _block(width), "num_warps": 4},
                )
        return dout, dbranch, dweights


def _block(width: int) -> int:
    return min(1024, max(16, next_power_of_2(width)))


def _tiles(tokens: int, width: int) -> tuple[int, tuple[int, int]]:
    block = _block(width)
    return block, (tokens, ceil_div(width, block))


@jit
def gated_mean_kernel(logits, normed, out, width, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(N):
        place = (token * N + stream) * width + column
        share = tl.sigmoid(tl.load(logits + place, mask, 0.0).to(tl.float32))
        total += share * tl.load(normed + place, mask, 0.0).to(tl.float32)
    tl.store(out + token * width + column, (total / N).to(out.dtype.element_ty), mask)


@jit
def gated_mean_backward_kernel(
    logits, normed, dout, dlogits, dnormed, width, N: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    each = tl.load(dout + token * width + column, mask, 0.0).to(tl.float32) / N
    for stream in tl.static_range(N):
        place = (token * N + stream) * width + column
        share = tl.sigmoid(tl.load(logits + place, mask, 0.0).to(tl.float32))
        found = each * tl.load(normed + place, mask, 0.0).to(tl.float32) * share * (1.0 - share)
        tl.store(dlogits + place, found.to(dlogits.dtype.element_ty), mask)
        tl.store(dnormed + place, (each * share).to(dnormed.dtype.element_ty), mask)


@jit
def added_kernel(streams, branch, weights, out, width, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    own = tl.load(branch + token * width + column, mask, 0.0).to(tl.float32)
    for stream in tl.static_range(N):
        place = (token * N + stream) * width + column
        weight = tl.load(weights + token * N + stream).to(tl.float32)
        total = tl.load(streams + place, mask, 0.0).to(tl.float32) + weight * own
        tl.store(out + place, total.to(out.dtype.element_ty), mask)


@jit
def added_backward_kernel(
    branch,
    weights,
    dout,
    dbranch,
    dweights,
    width,
    N: tl.constexpr,
    NS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i, column = tl.arange(0, NS), tl.arange(0, BLOCK)
    own = tl.load(weights + token * N + i, i < N, 0.0).to(tl.float32)
    of_weights = tl.zeros([NS, BLOCK], tl.float32)
    dout += token * N * width
    for start in range(0, width, BLOCK):
        inside = start + column < width
        place = i[:, None] * width + start + column[None, :]
        found = tl.load(dout + place, (i[:, None] < N) & inside[None, :], 0.0).to(tl.float32)
        x = tl.load(branch + token * width + start + column, inside, 0.0).to(tl.float32)
        of_weights += found * x[None, :]
        total = tl.sum(found * own[:, None], 0)
        tl.store(dbranch + token * width + start + column, total.to(dbranch.dtype.element_ty), inside)
    sums = tl.sum(of_weights, 1)
    tl.store(dweights + token * N + i, sums.to(dweights.dtype.element_ty), i < N)
