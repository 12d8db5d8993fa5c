"""Low-rank paths (LoRA: Hu et al., 2021, arXiv:2106.09685) next to the grouped products of stacked experts.

    C[r] = x[r] @ W[e]^T + t[r] @ B[e]^T,       t[r] = x[r] @ A[e]^T                 r: a row, e: its expert
    dx[r] = dC[r] @ W[e] + u[r] @ A[e],         u[r] = dC[r] @ B[e]
    dA[e] = sum over the rows of e of u[r]^T x[r],    dB[e] = sum over the rows of e of dC[r]^T t[r]

W is only read by the products, and may be frozen: no folded matrix, no gradient as large as W, no loop over
experts. C and dx are rounded once, after the sum: the product with t or u is the last step of their own
products' sums (`rows_product` with `path`). t and u are narrow grouped products.

Trained tensors come in any dtype and in PEFT's order: A expert by expert, and B with its columns rank by
rank. They are cast to the products' dtype once per pass, B transposed, with its scale and its experts first,
and padded to P ranks, a power of two of at least 16. Several paths of one stack are one, with their ranks
concatenated.

17 launches in addition for paths of both stacks: six in the forward pass (A cast, B packed, and t, twice) and
eleven in the backward pass (A, B and u again, twice; dA, dB, twice; t weighed once).

Bytes moved in addition, per product of R rows from `inputs` to `outputs`: R (inputs + P) in the forward
pass, and R (inputs + 2 outputs + 3 P) in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    shared_memory,
    tl,
)
from liger_models.kernels.experts._expert_order import ExpertOrder
from liger_models.kernels.experts._expert_rows import weigh_rows
from liger_models.kernels.experts._grouped_products import precision_of


class ExpertPath(NamedTuple):
    """A low-rank path of each matrix of a stack W [E, outputs, inputs]: W[e] + scale * B[e] @ A[e].

    Attributes:
        a: [E r, inputs], any floating dtype. Rows e r to (e + 1) r are A[e].
        b: [outputs, r E], any floating dtype. Column i E + e is column i of B[e].
        scale: alpha / r, usually.
    """

    a: Tensor
    b: Tensor
    scale: float


class PackedPaths(NamedTuple):
    """The paths of a stack as one, in the dtype of the products.

    Attributes:
        a: [E, P, inputs]
        b: [E, P, outputs], transposed and times the scale.
    """

    a: Tensor
    b: Tensor


def pack_paths(paths: Sequence[ExpertPath], num_experts: int, dtype: torch.dtype) -> PackedPaths:
    """Concatenate at least one path by ranks, with zeros up to P."""
    ranks = [len(path.a) // num_experts for path in paths]
    width = padded_rank(ranks)
    inputs, outputs = paths[0].a.shape[1], len(paths[0].b)
    memory = paths[0].a.new_empty if sum(ranks) == width else paths[0].a.new_zeros
    b = memory(num_experts, width, outputs, dtype=dtype)
    if ranks == [width]:
        a = paths[0].a.detach().reshape(num_experts, width, inputs).to(dtype)
    else:
        a = memory(num_experts, width, inputs, dtype=dtype)
    first = 0
    for path, rank in zip(paths, ranks, strict=True):
        if ranks != [width]:
            a[:, first : first + rank] = path.a.detach().unflatten(0, (num_experts, rank))
        _pack_b(path.b.detach().contiguous(), b, first, rank, path.scale)
        first += rank
    return PackedPaths(a.contiguous(), b)


def padded_rank(ranks: Sequence[int]) -> int:
    """P, the columns of t, of paths of these ranks."""
    return max(16, next_power_of_2(sum(ranks)))


def _pack_b(b: Tensor, packed: Tensor, first: int, rank: int, scale: float) -> None:
    num_experts, width, outputs = packed.shape
    block, block_experts = 64, min(128, next_power_of_2(num_experts))
    grid = ceil_div(outputs, block), ceil_div(num_experts, block_experts), rank
    with on_device_of(packed):
        _pack_b_kernel[grid](
            b,
            packed,
            scale,
            first,
            rank,
            outputs,
            num_experts,
            width,
            BLOCK=block,
            BLOCK_EXPERTS=block_experts,
            num_warps=8,
        )


def path_gradients(
    paths: Sequence[ExpertPath],
    wanted: Sequence[tuple[bool, bool]],
    order: ExpertOrder,
    inputs: tuple[Tensor, bool],
    outputs: tuple[Tensor, bool],
    t: Tensor,
    u: Tensor,
    weights: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of a, b of each path in turn, None where not wanted.

    Args:
        inputs, outputs: the product's input, and the gradient of its output, each with whether it is in token
            order ([T, n], to be gathered) or in row order [R, n]. Inputs are read only if an a is wanted.
        t, u: [R, P], x A^T and dC B, the latter times the scale.
        weights: [T, k], multiply each row's part of the gradients of b. (The gradients of a are in `inputs`.)
    """
    num_experts = order.offsets.numel() - 1
    ranks = [len(path.a) // num_experts for path in paths]
    of_a = of_b = None
    # The gradients of a single path are written as they are returned.
    dtype, scale = (paths[0].a.dtype, paths[0].scale) if len(paths) == 1 else (torch.float32, 1.0)
    if any(a for a, _ in wanted):
        of_a = u.new_empty(num_experts, sum(ranks), inputs[0].shape[1], dtype=dtype)
        _outer_product(*inputs, u, order, of_a.permute(0, 2, 1), 1.0)
    if any(b for _, b in wanted):
        t = t if weights is None else weigh_rows(t, weights, order)
        of_b = u.new_empty(outputs[0].shape[1], sum(ranks), num_experts, dtype=dtype)
        _outer_product(*outputs, t, order, of_b.permute(2, 0, 1), scale)
    gradients: list[Tensor | None] = []
    first = 0
    for path, rank, (want_a, want_b) in zip(paths, ranks, wanted, strict=True):
        last = first + rank
        da = of_a[:, first:last].reshape(path.a.shape) if want_a and of_a is not None else None
        db = of_b[:, first:last].reshape(path.b.shape) if want_b and of_b is not None else None
        if db is not None and len(paths) > 1:
            db = path.scale * db
        gradients += [None if d is None else d.to(like.dtype) for d, like in ((da, path.a), (db, path.b))]
        first = last
    return gradients


def _outer_product(
    wide: Tensor, gather: bool, thin: Tensor, order: ExpertOrder, out: Tensor, scale: float
) -> None:
    """out[e] [n, r] = scale * sum over the rows of e of wide[row]^T thin[row, :r], in float32.

    wide [T, n] with `gather`, or [R, n], thin [R, P]; out [E, n, r] of any strides.
    """
    num_experts, width, rank = out.shape
    if not order.num_rows:
        out.zero_()
        return
    block, block_rows, num_warps, num_stages = _outer_config(wide)
    block_rank = min(64, thin.shape[1])
    with on_device_of(wide):
        _outer_kernel[(num_experts * ceil_div(width, block), ceil_div(rank, block_rank))](
            wide,
            thin,
            out,
            order.offsets,
            order.order,
            scale,
            wide.stride(0),
            thin.stride(0),
            *out.stride(),
            width,
            rank,
            TOKENS=order.top_k if gather else 0,
            PRECISION=precision_of(wide.dtype),
            BLOCK=block,
            BLOCK_ROWS=block_rows,
            BLOCK_RANK=block_rank,
            num_warps=num_warps,
            num_stages=num_stages,
        )


def _outer_config(wide: Tensor) -> tuple[int, int, int, int]:
    """Blocks of columns and of rows, warps, stages. With four, three blocks of both operands are in shared
    memory, and take 72 KB with 64 columns of `thin`.
    """
    if wide.dtype == torch.float32:
        return 64, 32, 4, 2
    return 128, 64, 4, 4 if shared_memory(wide) >= 72 * 1024 else 3


def add_path_plain(h: Tensor, x: Tensor, path: ExpertPath, expert: int, num_experts: int) -> Tensor:
    """Plain form of a path of one expert: h [n, outputs] plus the path of x [n, inputs]."""
    a = path.a.unflatten(0, (num_experts, -1))[expert].to(x.dtype)
    b = path.b.unflatten(1, (-1, num_experts))[..., expert].to(x.dtype)
    return h + path.scale * ((x @ a.T) @ b.T)


def folded(matrices: Tensor, paths: Sequence[ExpertPath]) -> Tensor:
    """W + scale * B A of every expert [E, outputs, inputs], rounded once, for torch.compile only."""
    total = at_least_float32(matrices)
    for path in paths:
        a = path.a.unflatten(0, (len(matrices), -1)).to(total.dtype)
        b = path.b.unflatten(1, (-1, len(matrices))).permute(2, 0, 1).to(total.dtype)
        total = torch.baddbmm(total, b, a, alpha=path.scale)
    return total.to(matrices.dtype)


@jit
def _pack_b_kernel(
    b,
    packed,
    scale,
    first,
    rank,
    outputs,
    num_experts,
    width,
    BLOCK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None].to(tl.int64)
    expert = (tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS))[None, :].to(tl.int64)
    column = tl.program_id(2)
    mask = (row < outputs) & (expert < num_experts)
    value = tl.load(b + (row * rank + column) * num_experts + expert, mask).to(tl.float32) * scale
    at = packed + (expert * width + first + column) * outputs + row
    tl.store(at, value.to(packed.dtype.element_ty), mask)


@jit
def _outer_kernel(
    wide,
    thin,
    out,
    offsets,
    order,
    scale,
    wide_stride,
    thin_stride,
    expert_stride,
    column_stride,
    rank_stride,
    width,
    rank,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    expert = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK, BLOCK_RANK), tl.float32)
    for first in range(start, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        row_mask = row < end
        source = tl.load(order + row, row_mask, 0) // TOKENS if TOKENS else row
        mask = row_mask[:, None] & (column < width)[None, :]
        wide_block = tl.load(wide + source.to(tl.int64)[:, None] * wide_stride + column[None, :], mask, 0.0)
        thin_block = tl.load(
            thin + row.to(tl.int64)[:, None] * thin_stride + i[None, :], row_mask[:, None], 0.0
        )
        total = tl.dot(wide_block.T, thin_block, total, input_precision=PRECISION)
    at = out + expert.to(tl.int64) * expert_stride + column.to(tl.int64)[:, None] * column_stride
    mask = (column < width)[:, None] & (i < rank)[None, :]
    total *= scale
    tl.store(at + i.to(tl.int64)[None, :] * rank_stride, total.to(out.dtype.element_ty), mask)
