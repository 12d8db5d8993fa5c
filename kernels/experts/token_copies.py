"""Copy token rows for several readers, and sum over a token's copies.

    copy_tokens:  rows[position[t, j]] = x[t]                            where position[t, j] is not -1
    sum_copies:   y[t] = sum over j of rows[position[t, j]]              zero for a token without copies

Each is the other's gradient. Sums are in float32, in the order of j and without atomics, so results are
deterministic. Minimum traffic: x and rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_rows,
    at_least_float32,
    ceil_div,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    use_triton,
)
from liger_models.kernels.experts._expert_rows import _spread_rows_kernel, _sum_slots_kernel


def copy_tokens(x: Tensor, position: Tensor, num_rows: int) -> Tensor:
    """x [T, H] -> rows [num_rows, H].

    Args:
        x: any floating dtype.
        position: [T, n] int32; contains each of 0 .. num_rows - 1 once, and -1 elsewhere. Not checked.
    """
    return _Copies.apply(x, position, num_rows)


def sum_copies(rows: Tensor, position: Tensor) -> Tensor:
    """rows [R, H] -> y [T, H], in their dtype; `position` as for `copy_tokens`."""
    return _Sums.apply(rows, position)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor, num_rows: int) -> Tensor:
        ctx.position = position  # not saved: recomputation can stop before it
        rows = x.new_empty(num_rows, x.shape[1])
        if use_triton(x, position):
            x = as_rows(x)
            _launch(_spread_rows_kernel, position, rows, x, position, rows, None, x.stride(0))
        else:
            for slot in position.unbind(1):
                rows[slot[slot >= 0]] = x[slot >= 0]
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        return _Sums.apply(drows, ctx.position), None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, position: Tensor) -> Tensor:
        ctx.position, ctx.num_rows = position, len(rows)
        if use_triton(rows, position):
            y = rows.new_empty(len(position), rows.shape[1])
            operands = rows.contiguous(), None, position, y, None, y.stride(0)
            _launch(_sum_slots_kernel, position, rows, *operands, PARTS=0)
            return y
        total = at_least_float32(rows).new_zeros(len(position), rows.shape[1])
        for slot in position.unbind(1):
            total[slot >= 0] += rows[slot[slot >= 0]]
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _Copies.apply(dy, ctx.position, ctx.num_rows), None


def _launch(kernel: Any, position: Tensor, rows: Tensor, *operands: Any, **sizes: int) -> None:
    """Launch one program per token and block of columns."""
    width, (num_tokens, top_k) = rows.shape[1], position.shape
    if position.numel() and width:
        block = min(1024, next_power_of_2(width))
        sizes |= {"TOP_K": top_k, "TOKENS": 1, "SLOTS": next_power_of_2(top_k), "BLOCK": block}
        with on_device_of(position):
            kernel[(num_tokens, ceil_div(width, block))](*operands, num_tokens, width, 0, len(rows), **sizes)
