"""Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), alone or after a residual add.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)

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
from liger_models.kernels.float8.copies import carry_rows
from liger_models.kernels.float8.quantize import Float8, casts_to_float8, empty_rows, rows_plain
from liger_models.kernels.norms._norm_kernels import MAX_BLOCK_WIDTH, norm_backward, norm_forward


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "llama",
    float8: bool = False,
) -> Tensor:
    """RMSNorm over the last dimension, computed in float32 whatever the dtype.

    Args:
        x: [..., H], any floating dtype, any strides.
        weight: [H], or None for none.
        eps: added to the mean square.
        offset: added to the weight, in float32 (Gemma: 1.0).
        cast: where the result is rounded to x's dtype. "llama": before the weight, and the result has the
            dtype to which PyTorch promotes x and weight. "gemma", "float32" (OLMo 2): once, after the weight.
        float8: let y carry its copy in e4m3 by rows (kernels/float8/copies.py), if x is a matrix and its GPU
            has e4m3.

    Returns:
        y [..., H], contiguous. Results are deterministic.

    Raises:
        ValueError: the weight's shape is not (H,), an offset has no weight, tensors are on different devices,
            or `cast` is unknown.
    """
    _check(x, weight, offset, cast)
    if use_triton(x, weight):
        y, *copy = _RMSNorm.apply(x, weight, eps, offset, cast == "llama", float8)
        return y if copy[0] is None else carry_rows(y, Float8(*copy))
    y = as_once_differentiable(rms_norm_plain(x, weight, eps, offset, cast))
    return _with_copy(y) if float8 else y


def rms_norm_plain(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    """Plain twin of `rms_norm`."""
    wide = at_least_float32(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    scale = at_least_float32(weight) + offset
    if cast == "llama":
        return (scale * normed.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))
    return (scale * normed).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "llama",
    float8: bool = False,
    float8_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm in one pass.

    Args:
        x, residual: [..., H], of the same shape.
        weight, eps, offset, cast, float8: as in `rms_norm`.
        float8_gradient: let the gradient of x carry its copy, too. The plain twin's does not.

    Returns:
        y and total, both [..., H]: bitwise equal to `total = x + residual`, `y = rms_norm(total, weight)`. Of
        the activations, only `total` is saved for the backward pass.

    Raises:
        ValueError: as `rms_norm`, or the shapes of x and residual differ.
    """
    _check(x, weight, offset, cast)
    if x.shape != residual.shape:
        raise ValueError(f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}; expected one shape")
    if use_triton(x, residual, weight):
        y, total, *copy = _AddRMSNorm.apply(
            x, residual, weight, eps, offset, cast == "llama", float8, float8_gradient
        )
        return y if copy[0] is None else carry_rows(y, Float8(*copy)), total
    y, total = as_once_differentiable(*add_rms_norm_plain(x, residual, weight, eps, offset, cast))
    return _with_copy(y) if float8 else y, total


def add_rms_norm_plain(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Plain twin of `add_rms_norm`."""
    total = x + residual
    return rms_norm_plain(total, weight, eps, offset, cast), total


def _with_copy(y: Tensor) -> Tensor:
    return carry_rows(y, rows_plain(y.detach().float())) if _has_copy(y) else y


def _has_copy(y: Tensor) -> bool:
    return y.dim() == 2 and y.shape[1] <= MAX_BLOCK_WIDTH and not torch.compiler.is_compiling()


def _makes_copy(x: Tensor) -> bool:
    return _has_copy(x) and casts_to_float8(x)


def _check(x: Tensor, weight: Tensor | None, offset: float, cast: str) -> None:
    if cast not in ("llama", "gemma", "float32"):
        raise ValueError(f"cast is {cast!r}; expected 'llama', 'gemma' or 'float32'")
    if weight is None:
        if offset:
            raise ValueError(f"offset is {offset} but there is no weight to add it to")
    elif weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight is {tuple(weight.shape)}; expected {tuple(x.shape[-1:])}, x's last dimension"
        )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, round_first, float8):
        weight = None if weight is None else weight.contiguous()
        copy = empty_rows(x) if float8 and _makes_copy(x) else None
        y, *_, rstd = norm_forward(
            x, None, weight, None, eps, offset, center=False, round_first=round_first, float8=copy
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.round_first = offset, round_first
        ctx.mark_non_differentiable(*(copy or ()))
        ctx.set_materialize_grads(False)
        return y, *(copy or (None, None))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_copies):
        if dy is None:
            return None, None, None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        dx, dweight, _ = norm_backward(
            dy,
            None,
            x,
            weight,
            None,
            rstd,
            ctx.offset,
            round_first=ctx.round_first,
            want_dweight=ctx.needs_input_grad[1],
        )
        return dx, dweight, None, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, round_first, float8, float8_gradient):
        weight = None if weight is None else weight.contiguous()
        copy = empty_rows(x) if float8 and _makes_copy(x) else None
        y, total, _, rstd = norm_forward(
            x, residual, weight, None, eps, offset, center=False, round_first=round_first, float8=copy
        )
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.round_first = offset, round_first
        ctx.dtypes = x.dtype, residual.dtype
        ctx.float8_gradient = float8_gradient and _makes_copy(x) and y.dtype == x.dtype == residual.dtype
        ctx.mark_non_differentiable(*(copy or ()))
        return y, total, *(copy or (None, None))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal, *_copies):
        dx, dweight = dtotal, None
        if dy is not None:
            total, weight, rstd = ctx.saved_tensors
            copy = empty_rows(total) if ctx.float8_gradient else None
            dx, dweight, _ = norm_backward(
                dy,
                dtotal,
                total,
                weight,
                None,
                rstd,
                ctx.offset,
                round_first=ctx.round_first,
                want_dweight=ctx.needs_input_grad[2],
                float8=copy,
            )
            if copy is not None:
                carry_rows(dx, copy)
        if dx is None:
            return (None,) * 8
        x_dtype, residual_dtype = ctx.dtypes
        return dx.to(x_dtype), dx.to(residual_dtype), dweight, *(None,) * 5
