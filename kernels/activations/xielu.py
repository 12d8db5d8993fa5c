"""xIELU, an activation with two learned slopes (Huang and Schlag, 2024, arXiv:2411.13010).

    y = ap x^2 + beta x                                 where x > 0,      ap = softplus(alpha_p)
    y = an (expm1(min(x, eps)) - x) + beta x            elsewhere,        an = beta + softplus(alpha_n)

Everything is computed in float32 and rounded once. Minimum traffic, for n elements of b bytes: forward 2 n b,
backward 3 n b. Only the input is kept for the backward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    at_least_float32,
    ceil_div,
    contiguous_like,
    jit,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU, elementwise.

    Args:
        x: [...], any floating dtype.
        alpha_p, alpha_n: one number each, before the softplus.
        beta, eps: one number each, without gradients; eps is a little below 0.

    Returns:
        Tensor of x's shape and dtype, contiguous. Results and gradients are deterministic.

    Raises:
        ValueError: one of the four parameters is not a single number.
    """
    numbers = {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}
    for name, number in numbers.items():
        if number.numel() != 1:
            raise ValueError(f"{name} must be a single number, found a tensor {tuple(number.shape)}")
    if not use_triton(x, *numbers.values()):
        return as_once_differentiable(xielu_plain(x, alpha_p, alpha_n, beta, eps))
    # In float64, so that a slope and its gradient through the softplus are rounded once.
    positive, negative = _slopes(alpha_p.double(), alpha_n.double(), beta.double())
    constants = [beta.detach().float().view(1), eps.detach().float().view(1)]
    return _XIELU.apply(x, torch.cat([positive, negative]), torch.cat(constants))


def xielu_plain(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Plain twin of `xielu`."""
    positive, negative = _slopes(alpha_p, alpha_n, beta)
    wide, beta, eps = at_least_float32(x), at_least_float32(beta.detach()), at_least_float32(eps.detach())
    below = negative * (torch.expm1(torch.minimum(wide, eps.to(wide.dtype))) - wide)
    return (torch.where(wide > 0, positive * wide * wide, below) + beta * wide).to(x.dtype)


def _slopes(alpha_p: Tensor, alpha_n: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """ap and an, [1] each, in float32 or float64."""
    alpha_p, alpha_n = at_least_float32(alpha_p).view(1), at_least_float32(alpha_n).view(1)
    return F.softplus(alpha_p), at_least_float32(beta.detach()) + F.softplus(alpha_n)


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slopes, constants):
        slopes = slopes.float()
        ctx.save_for_backward(x, slopes, constants)
        y = contiguous_like(x)
        if count := y.numel():
            with on_device_of(x):
                _forward_kernel[_grid(count)](
                    x.contiguous(), slopes, constants, y, count, _BLOCK, num_warps=8
                )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, slopes, constants = ctx.saved_tensors
        dx, count = contiguous_like(x), x.numel()
        sums = slopes.new_zeros(2, max(1, *_grid(count)))  # one per program, added in a fixed order
        if count:
            x, dy = x.contiguous(), dy.contiguous()
            with on_device_of(x):
                _backward_kernel[_grid(count)](
                    dy, x, slopes, constants, dx, sums, count, sums.shape[1], _BLOCK, num_warps=8
                )
        return dx, sums.double().sum(1), None


_BLOCK = 2048


def _grid(count: int) -> tuple[int]:
    return (ceil_div(count, _BLOCK),)


@jit
def _beyond_line(m):
    """expm1(m) - m for m <= 0, by its series where the exponential would cancel."""
    series = 1 + m / 5 * (1 + m / 6 * (1 + m / 7 * (1 + m / 8)))
    series = m * m * 0.5 * (1 + m / 3 * (1 + m / 4 * series))
    return tl.where(m > -0.5, series, tl.exp(m) - 1 - m)


@jit
def _forward_kernel(x, slopes, constants, y, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < count, 0.0).to(tl.float32)
    positive, negative = tl.load(slopes), tl.load(slopes + 1)
    beta, eps = tl.load(constants), tl.load(constants + 1)
    low = tl.minimum(value, eps)
    below = negative * (_beyond_line(low) + (low - value))
    bent = tl.where(value > 0, positive * value * value, below)
    tl.store(y + index, (bent + beta * value).to(y.dtype.element_ty), index < count)


@jit
def _backward_kernel(dy, x, slopes, constants, dx, sums, count, programs, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < count, 0.0).to(tl.float32)
    gradient = tl.load(dy + index, index < count, 0.0).to(tl.float32)
    positive, negative = tl.load(slopes), tl.load(slopes + 1)
    beta, eps = tl.load(constants), tl.load(constants + 1)
    low = tl.minimum(value, eps)
    beyond = _beyond_line(low)
    exponential = tl.where(value < eps, beyond + low + 1, 0.0)  # exp(x), unless clamped
    slope = tl.where(value > 0, 2 * positive * value, negative * (exponential - 1)) + beta
    tl.store(dx + index, (gradient * slope).to(dx.dtype.element_ty), index < count)
    tl.store(sums + program, tl.sum(tl.where(value > 0, gradient * value * value, 0.0)))
    tl.store(sums + programs + program, tl.sum(tl.where(value > 0, 0.0, gradient * (beyond + (low - value)))))
