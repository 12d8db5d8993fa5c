"""Layer normalisation (Ba, Kiros and Hinton, 2016, arXiv:1607.06450), alone or after a residual add.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (offset + weight) + bias

Formulas of the gradients and bytes moved: `_norm_kernels.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    at_least_float32,
    once_differentiable,
    use_triton,
)
from liger_models.kernels.norms._norm_kernels import norm_backward, norm_forward


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5, offset: float = 0.0
) -> Tensor:
    """LayerNorm over the last dimension, computed in float32 and rounded once.

    Args:
        x: [..., H], any floating dtype, any strides.
        weight, bias: [H], or None for none.
        eps: added to the variance.
        offset: added to the weight, in float32 (Nemotron's LayerNorm1P: 1.0).

    Returns:
        y [..., H] in x's dtype, contiguous. Results are deterministic.

    Raises:
        ValueError: weight's or bias's shape is not (H,), an offset has no weight, or tensors are on
            different devices.
    """
    _check(x, weight, bias, offset)
    if use_triton(x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps, offset)
    return as_once_differentiable(layer_norm_plain(x, weight, bias, eps, offset))


def layer_norm_plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5, offset: float = 0.0
) -> Tensor:
    """Plain twin of `layer_norm`."""
    wide = at_least_float32(x)
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (at_least_float32(weight) + offset)
    if bias is not None:
        y = y + at_least_float32(bias)
    return y.to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm in one pass.

    Args:
        x, residual: [..., H], of the same shape.
        weight, bias, eps, offset: as in `layer_norm`.

    Returns:
        y and total, both [..., H]: bitwise equal to `total = x + residual`, `y = layer_norm(total, weight,
        bias)`. Of the activations, only `total` is saved for the backward pass.

    Raises:
        ValueError: as `layer_norm`, or the shapes of x and residual differ.
    """
    _check(x, weight, bias, offset)
    if x.shape != residual.shape:
        raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}; expected one shape")
    if use_triton(x, residual, weight, bias):
        return _AddLayerNorm.apply(x, residual, weight, bias, eps, offset)
    return as_once_differentiable(*add_layer_norm_plain(x, residual, weight, bias, eps, offset))


def add_layer_norm_plain(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `add_layer_norm`."""
    total = x + residual
    return layer_norm_plain(total, weight, bias, eps, offset), total


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> None:
    if weight is None and offset:
        raise ValueError(f"offset is {offset} but there is no weight to add it to")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            expected = f"expected {tuple(x.shape[-1:])}, x's last dimension"
            raise ValueError(f"{name} is {tuple(vector.shape)}; {expected}")


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, offset):
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, offset, center=True, round_first=False)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.offset = offset
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        _, want_dweight, want_dbias, *_ = ctx.needs_input_grad
        dx, dweight, dbias = norm_backward(
            dy,
            None,
            x,
            weight,
            mean,
            rstd,
            ctx.offset,
            round_first=False,
            want_dweight=want_dweight,
            dbias_dtype=ctx.bias_dtype if want_dbias else None,
        )
        return dx, dweight, dbias, None, None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, offset):
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y, total, mean, rstd = norm_forward(
            x, residual, weight, bias, eps, offset, center=True, round_first=False
        )
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.offset = offset
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtypes = x.dtype, residual.dtype
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        dx, dweight, dbias = dtotal, None, None
        if dy is not None:
            total, weight, mean, rstd = ctx.saved_tensors
            _, _, want_dweight, want_dbias, *_ = ctx.needs_input_grad
            dx, dweight, dbias = norm_backward(
                dy,
                dtotal,
                total,
                weight,
                mean,
                rstd,
                ctx.offset,
                round_first=False,
                want_dweight=want_dweight,
                dbias_dtype=ctx.bias_dtype if want_dbias else None,
            )
        if dx is None:
            return None, None, None, None, None, None
        x_dtype, residual_dtype = ctx.dtypes
        return dx.to(x_dtype), dx.to(residual_dtype), dweight, dbias, None, None
