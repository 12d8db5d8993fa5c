"""Rows of a table by id, with a gradient that moves each element once.

    y[t] = W[id_t],    dW[v] = the sum of dy[t] over the tokens t with id_t = v

The gradient of T tokens reads T H elements and writes V H, most of them zeros. Tokens are sorted by id. Each
program adds the gradients of a piece of them in float32, in their order. Rows whose tokens lie in one piece
are written at once; of the others each piece leaves a partial sum, and a second kernel adds these in order.
So a sum does not depend on the schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_rows,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of a table.

    Args:
        ids: [...], int64 or int32, from 0 to V - 1.
        weight: [V, H], any floating dtype.
        padding_idx: a row without a gradient.

    Returns:
        [..., H] in the weight's dtype. The gradient is summed in float32 and rounded once; running it again
        gives the same bits.

    Raises:
        ValueError: tensors on two devices, or a weight that is no matrix.
        IndexError: on a CPU, an id outside the table.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight is {tuple(weight.shape)}; expected [V, H]")
    if weight.requires_grad and torch.is_grad_enabled() and use_triton(weight, ids):
        return _Embedding.apply(weight, ids, padding_idx)
    return embedding_plain(ids, weight, padding_idx)


def embedding_plain(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Plain twin of `embedding`."""
    return F.embedding(ids, weight, padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.padding_idx = weight.shape, weight.dtype, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        dweight = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dy.device)
        rows, width = as_rows(dy), ctx.shape[1]
        if not rows.numel():
            return dweight, None, None
        ordered, order = ids.flatten().int().sort(stable=True)
        pieces, block = ceil_div(len(rows), _PIECE), min(_COLUMNS, next_power_of_2(width))
        # The sums of the first and of the last row of each piece, if other pieces have tokens of it.
        partial = torch.empty(2, pieces, width, dtype=torch.float32, device=dy.device)
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx % ctx.shape[0]
        grid, sizes = (pieces, ceil_div(width, block)), (len(rows), pieces, width, padding)
        with on_device_of(rows):
            sums_kernel[grid](
                rows,
                ordered,
                order,
                dweight,
                partial,
                rows.stride(0),
                *sizes,
                PIECE=_PIECE,
                BLOCK=block,
                num_warps=4,
            )
            joined_kernel[grid](ordered, dweight, partial, *sizes, PIECE=_PIECE, BLOCK=block, num_warps=4)
        return dweight, None, None


_PIECE = 32  # tokens per program
_COLUMNS = 512  # per program: four a thread


@jit
def sums_kernel(
    dy,
    ordered,
    order,
    dweight,
    partial,
    stride,
    tokens,
    pieces,
    width,
    padding,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the rows of `dweight` whose tokens all lie in this piece, and partial sums [2, pieces, width]."""
    piece = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    begin = piece * PIECE
    before = tl.load(ordered + begin - 1, begin > 0, -1)  # the id of the token before this piece
    total = tl.zeros([BLOCK], tl.float32)
    for nth in range(begin, tl.minimum(begin + PIECE, tokens)):
        own = tl.load(ordered + nth)
        following = tl.load(ordered + nth + 1, nth + 1 < tokens, -1)
        row = tl.load(order + nth)
        total += tl.load(dy + row * stride + column, inside, 0.0).to(tl.float32)
        ends, last = following != own, nth == begin + PIECE - 1
        whole = ends & (own != before) & (own != padding)
        tl.store(
            dweight + own.to(tl.int64) * width + column, total.to(dweight.dtype.element_ty), inside & whole
        )
        # A row that began in an earlier piece is this one's first; one that only goes on is its last.
        first = (own == before) & (ends | last)
        goes_on = (own != before) & last & (ends == 0)
        place = partial + (tl.where(first, 0, pieces) + piece).to(tl.int64) * width + column
        tl.store(place, total, inside & (first | goes_on))
        total = tl.where(ends, 0.0, total)


@jit
def joined_kernel(
    ordered,
    dweight,
    partial,
    tokens,
    pieces,
    width,
    padding,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row that begins in this piece and goes on in the next, if there is one."""
    piece = tl.program_id(0)
    end = piece * PIECE + PIECE
    if end >= tokens:
        return
    own = tl.load(ordered + end - 1)
    before = tl.load(ordered + end - PIECE - 1, piece > 0, -1)
    if (tl.load(ordered + end) != own) | (before == own) | (own == padding):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(partial + (pieces + piece).to(tl.int64) * width + column, inside, 0.0)
    piece += 1
    more = tl.load(ordered + end) == own
    while more:
        total += tl.load(partial + piece.to(tl.int64) * width + column, inside, 0.0)
        end = piece * PIECE + PIECE
        more = tl.load(ordered + end, end < tokens, -1) == own
        piece += 1
    tl.store(dweight + own.to(tl.int64) * width + column, total.to(dweight.dtype.element_ty), inside)
