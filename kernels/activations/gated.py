"""Gated activations of MLPs, and the squared ReLU.

    SwiGLU (Shazeer, 2020, arXiv:2002.05202): y = silu(gate) * up,   silu(g) = g / (1 + exp(-g))
    GeGLU  (the same):                        y = gelu(gate) * up,   gelu(g) = g * Phi(g)
    clamped SwiGLU (gpt-oss):                 y = g sigmoid(alpha g) * (clip(up) + 1),   g = min(gate, limit),
                                              clip to -limit .. limit; or without + 1 (DeepSeek-V4)
    capped SwiGLU (Step 3.5):                 y = min(silu(gate), limit) * clip(up)
    sigmoid gate:                             y = sigmoid(gate) * up
    gated squared ReLU (BitNet b1.58):        y = max(gate, 0)^2 * up
    ReLU squared (So et al., 2021, arXiv:2109.08668): y = max(x, 0)^2

Phi is the normal distribution's, "none": (1 + erf(g / sqrt(2))) / 2, or its approximation "tanh" (Hendrycks
and Gimpel, 2016, arXiv:1606.08415): (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3).

Everything is computed in float32 and rounded once. Minimum traffic, for I outputs a row of b bytes each:
forward 3 I b, backward 5 I b; ReLU squared 2 I b and 3 I b. Only the inputs are kept for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    ceil_div,
    contiguous_like,
    graph_is_kept,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The clamped SwiGLU and its constants, for activations passed as data: see `clamped_swiglu`."""

    alpha: float = 1.702
    limit: float = 7.0
    plus_one: bool = True


@dataclass(frozen=True)
class CappedSwiGLU:
    """The capped SwiGLU and its limit, for activations passed as data: see `capped_swiglu`."""

    limit: float


Activation = str | ClampedSwiGLU | CappedSwiGLU


def swiglu(gate_up: Tensor, up: Tensor | None = None, *, reuse_input: bool = False) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [..., 2 I], gate first; or only the gate, [..., I], if `up` is given.
        up: [..., I] in the gate's dtype.
        reuse_input: let the backward pass overwrite a packed `gate_up` with the gradient, unless the graph is
            retained. The caller guarantees that `gate_up` is not read afterwards.

    Returns:
        [..., I] in the input's dtype, contiguous. Results are deterministic.

    Raises:
        ValueError: an odd last dimension; gate and up of different shapes or dtypes, or on different devices.
    """
    return _gated(gate_up, up, "silu", reuse_input)


def geglu(
    gate_up: Tensor, up: Tensor | None = None, approximate: str = "tanh", *, reuse_input: bool = False
) -> Tensor:
    """gelu(gate) * up. `approximate` is "tanh" or "none", as in torch; otherwise as `swiglu`."""
    return _gated(gate_up, up, _gelu_name(approximate), reuse_input)


def clamped_swiglu(
    gate_up: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    *,
    plus_one: bool = True,
    reuse_input: bool = False,
) -> Tensor:
    """g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1), g = min(gate, limit); or, not `plus_one`,
    without the 1.

    At the limits gradients are nonzero, beyond them zero, as in torch.clamp. Otherwise as `swiglu`.
    """
    return _gated(gate_up, up, ClampedSwiGLU(alpha, limit, plus_one), reuse_input)


def capped_swiglu(
    gate_up: Tensor, up: Tensor | None = None, limit: float = 7.0, *, reuse_input: bool = False
) -> Tensor:
    """min(silu(gate), limit) * clip(up, -limit, limit).

    At the limits gradients are nonzero, beyond them zero, as in torch.clamp. Otherwise as `swiglu`.
    """
    return _gated(gate_up, up, CappedSwiGLU(limit), reuse_input)


def sigmoid_gated(gate_up: Tensor, up: Tensor | None = None, *, reuse_input: bool = False) -> Tensor:
    """sigmoid(gate) * up. Otherwise as `swiglu`."""
    return _gated(gate_up, up, "sigmoid", reuse_input)


def relu2_gated(gate_up: Tensor, up: Tensor | None = None, *, reuse_input: bool = False) -> Tensor:
    """max(gate, 0)^2 * up (Wang et al., 2025, arXiv:2504.12285, section 2). Otherwise as `swiglu`."""
    return _gated(gate_up, up, "relu2", reuse_input)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 of x [...] in any floating dtype. The result is contiguous, of x's shape and dtype."""
    return _ReLU2.apply(x) if use_triton(x) else as_once_differentiable(relu2_plain(x))


def relu2_plain(x: Tensor) -> Tensor:
    """Plain twin of `relu2`."""
    return at_least_float32(x).relu().square().to(x.dtype)


def _gelu_name(approximate: str) -> str:
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate is {approximate!r}; expected 'tanh' or 'none'")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _gated(gate_up: Tensor, up: Tensor | None, activation: Activation, reuse_input: bool) -> Tensor:
    if up is None:
        if gate_up.shape[-1] % 2:
            raise ValueError(
                f"gate_up is {tuple(gate_up.shape)}; expected an even last dimension, gate then up"
            )
    elif gate_up.shape != up.shape or gate_up.dtype != up.dtype:
        found = f"gate is {tuple(gate_up.shape)} {gate_up.dtype}, up is {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"{found}; expected the same shape and dtype")
    if not use_triton(gate_up, up):
        return as_once_differentiable(gated_plain(gate_up, up, activation))
    if up is None:
        return _Packed.apply(gate_up, activation, reuse_input)
    return _Separate.apply(gate_up, up, activation)


def gated_plain(gate_up: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """Plain twin of `swiglu` ("silu"), `geglu` ("gelu_tanh", "gelu"), `sigmoid_gated` ("sigmoid"),
    `relu2_gated` ("relu2"), and the clamped ones.
    """
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    gate, wide_up = at_least_float32(gate), at_least_float32(up)
    if isinstance(activation, ClampedSwiGLU):
        gate = gate.clamp(max=activation.limit)
        activated = gate * torch.sigmoid(activation.alpha * gate)
        wide_up = wide_up.clamp(-activation.limit, activation.limit) + int(activation.plus_one)
    elif isinstance(activation, CappedSwiGLU):
        activated = F.silu(gate).clamp(max=activation.limit)
        wide_up = wide_up.clamp(-activation.limit, activation.limit)
    elif activation == "silu":
        activated = F.silu(gate)
    elif activation == "sigmoid":
        activated = torch.sigmoid(gate)
    elif activation == "relu2":
        activated = gate.relu().square()
    else:
        activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * wide_up).to(up.dtype)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, activation, reuse_input):
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.reuse_input = activation, reuse_input
        *lead, width = gate_up.shape
        y = gate_up.new_empty(*lead, width // 2)
        launch_forward(gate_up, None, y, activation)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        dgate_up = room_for_gradient(gate_up, ctx.reuse_input)
        launch_backward(dy, gate_up, None, dgate_up, None, ctx.activation)
        return dgate_up, None, None


def room_for_gradient(gate_up: Tensor, reuse_input: bool) -> Tensor:
    """In a backward pass: memory for the gradient, that of gate_up itself if it may be reused."""
    if not reuse_input or not gate_up.is_contiguous() or graph_is_kept():
        return contiguous_like(gate_up)
    # Each element's gradient is written by the thread that read the element.
    torch.autograd.graph.increment_version(gate_up)
    return gate_up


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        y = contiguous_like(gate)
        launch_forward(gate, up, y, activation)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dgate, dup = contiguous_like(gate), contiguous_like(up)
        launch_backward(dy, gate, up, dgate, dup, ctx.activation)
        return dgate, dup, None


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = contiguous_like(x)
        launch_relu2_forward(x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = contiguous_like(x)
        launch_relu2_backward(dy, x, dx)
        return dx


def launch_relu2_forward(x: Tensor, y: Tensor) -> None:
    """Write max(x, 0)^2 into y, contiguous."""
    if count := y.numel():
        with on_device_of(x):
            _relu2_forward_kernel[_flat_grid(count)](x.contiguous(), y, count, 2048, num_warps=8)


def launch_relu2_backward(dy: Tensor, x: Tensor, dx: Tensor, y: Tensor | None = None) -> None:
    """Write the gradient of x into dx, contiguous. With `y`, contiguous, which may be dy, also write the
    forward pass's result again.
    """
    if count := dx.numel():
        x, dy = x.contiguous(), dy.contiguous()
        with on_device_of(x):
            _relu2_backward_kernel[_flat_grid(count)](dy, x, dx, y, count, 2048, num_warps=8)


def _flat_grid(count: int) -> tuple[int]:
    return (ceil_div(count, 2048),)


def launch_forward(gate: Tensor, up: Tensor | None, y: Tensor, activation: Activation) -> None:
    """Write act(gate) * up into y [..., I]; without `up`, gate is the packed [..., 2 I]."""
    if y.numel():
        gate, up = as_rows(gate), None if up is None else as_rows(up)
        up_stride = None if up is None else up.stride(0)
        rows, width = gate.shape[0], y.shape[-1]
        grid, blocks, num_warps = _tiles(rows, width)
        with on_device_of(y):
            _gated_forward_kernel[grid](
                gate,
                up,
                y,
                gate.stride(0),
                up_stride,
                rows,
                width,
                *blocks,
                **activation_constants(activation),
                num_warps=num_warps,
            )


def launch_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    dgate: Tensor,
    dup: Tensor | None,
    activation: Activation,
    y: Tensor | None = None,
) -> None:
    """Write the gradients of gate and up into dgate and dup, contiguous; if packed, both into dgate. With
    `y`, contiguous, which may be dy, also write the forward pass's result again.
    """
    if dy.numel():
        dy, gate, up = as_rows(dy), as_rows(gate), None if up is None else as_rows(up)
        up_stride = None if up is None else up.stride(0)
        rows, width = dy.shape
        grid, blocks, num_warps = _tiles(rows, width)
        with on_device_of(dy):
            _gated_backward_kernel[grid](
                dy,
                gate,
                up,
                dgate,
                dup,
                y,
                dy.stride(0),
                gate.stride(0),
                up_stride,
                rows,
                width,
                *blocks,
                **activation_constants(activation),
                num_warps=num_warps,
            )


def has_gate(activation: Activation) -> bool:
    """Whether the activation has a gate, and multiplies up by a function of it; "relu2" has only up."""
    return activation != "relu2"


def activation_constants(activation: Activation) -> dict[str, Any]:
    """Kernel arguments that describe an activation."""
    if isinstance(activation, ClampedSwiGLU):
        name = "clamped_swiglu" if activation.plus_one else "clamped_swiglu_alone"
        return {"ACTIVATION": name, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    if isinstance(activation, CappedSwiGLU):
        return {"ACTIVATION": "capped_swiglu", "ALPHA": 0.0, "LIMIT": activation.limit}
    return {"ACTIVATION": activation, "ALPHA": 0.0, "LIMIT": 0.0}


def _tiles(rows: int, width: int) -> tuple[tuple[int], tuple[int, int], int]:
    """Grid, tile shape (rows, columns) of about `_TILE` elements, and warps.

    Tiles are numbered along a row first, so that concurrent programs stream through adjacent memory.
    """
    elements, num_warps = _TILE
    block_width = min(elements, next_power_of_2(width))
    block_rows = elements // block_width
    return (
        (ceil_div(rows, block_rows) * ceil_div(width, block_width),),
        (block_rows, block_width),
        num_warps,
    )


# Elements and warps: 8 elements a thread, which bfloat16 loads in one instruction of 16 bytes.
_TILE = 1024, 4


@jit
def _tile(width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows [BLOCK_ROWS, 1] and columns [1, BLOCK_WIDTH] of this program's tile."""
    tiles_in_row = tl.cdiv(width, BLOCK_WIDTH)
    row = (tl.program_id(0) // tiles_in_row).to(tl.int64) * BLOCK_ROWS
    column = (tl.program_id(0) % tiles_in_row) * BLOCK_WIDTH
    return row + tl.arange(0, BLOCK_ROWS)[:, None], column + tl.arange(0, BLOCK_WIDTH)[None, :]


@jit
def _gated_forward_kernel(
    gate,
    up,
    y,
    gate_stride,
    up_stride,
    rows,
    width,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row, column = _tile(width, BLOCK_ROWS, BLOCK_WIDTH)
    mask = (row < rows) & (column < width)
    if up is None:  # packed after the gate, in the same rows
        up = gate + width
        up_stride = gate_stride
    g = tl.load(gate + row * gate_stride + column, mask, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask, 0.0).to(tl.float32)
    activated, _, factor, _ = gated_factors(g, u, ACTIVATION, ALPHA, LIMIT)
    tl.store(y + row * width + column, (activated * factor).to(y.dtype.element_ty), mask)


@jit
def _gated_backward_kernel(
    dy,
    gate,
    up,
    dgate,
    dup,
    y,
    dy_stride,
    gate_stride,
    up_stride,
    rows,
    width,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row, column = _tile(width, BLOCK_ROWS, BLOCK_WIDTH)
    mask = (row < rows) & (column < width)
    gradient_stride = width
    if up is None:  # packed after the gate, in the same rows
        up = gate + width
        dup = dgate + width
        up_stride = gate_stride
        gradient_stride = 2 * width
    gradient = tl.load(dy + row * dy_stride + column, mask, 0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask, 0.0).to(tl.float32)
    activated, derivative, factor, factor_derivative = gated_factors(g, u, ACTIVATION, ALPHA, LIMIT)
    target = row * gradient_stride + column
    tl.store(dgate + target, (gradient * factor * derivative).to(dgate.dtype.element_ty), mask)
    tl.store(dup + target, (gradient * activated * factor_derivative).to(dup.dtype.element_ty), mask)
    if y is not None:
        tl.store(y + row * width + column, (activated * factor).to(y.dtype.element_ty), mask)


@jit
def gated_factors(g, u, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The two factors of the result, from gate g and up u, each followed by its derivative. "relu2" is that
    of g; its other factor is u.
    """
    factor, factor_derivative = u, 1.0
    if ACTIVATION == "clamped_swiglu" or ACTIVATION == "clamped_swiglu_alone":
        beyond, up_beyond = g > LIMIT, tl.abs(u) > LIMIT  # both false for nan, which propagates as in torch
        g = tl.where(beyond, LIMIT, g)
        slope = tl.sigmoid(ALPHA * g)
        derivative = tl.where(beyond, 0.0, slope + g * (ALPHA * slope * (1 - slope)))
        factor = tl.where(up_beyond, tl.where(u > 0, LIMIT, -LIMIT), u)
        if ACTIVATION == "clamped_swiglu":
            factor += 1
        factor_derivative = tl.where(up_beyond, 0.0, 1.0)
    elif ACTIVATION == "capped_swiglu":
        slope = tl.sigmoid(g)
        derivative = slope + g * (slope * (1 - slope))
        beyond, up_beyond = g * slope > LIMIT, tl.abs(u) > LIMIT
        g, slope = tl.where(beyond, LIMIT, g), tl.where(beyond, 1.0, slope)
        derivative = tl.where(beyond, 0.0, derivative)
        factor = tl.where(up_beyond, tl.where(u > 0, LIMIT, -LIMIT), u)
        factor_derivative = tl.where(up_beyond, 0.0, 1.0)
    elif ACTIVATION == "sigmoid":
        slope = tl.sigmoid(g)
        derivative = slope * (1 - slope)
        g = 1.0
    elif ACTIVATION == "relu2":
        g = tl.where(g < 0, 0.0, g)  # nan stays nan, as in torch
        slope = g
        derivative = 2 * g
    # The others are act(g) = g * slope(g), so act'(g) = slope(g) + g * slope'(g).
    elif ACTIVATION == "silu":
        slope = tl.sigmoid(g)
        derivative = slope + g * (slope * (1 - slope))
    elif ACTIVATION == "gelu_tanh":
        slope = tl.sigmoid(1.5957691216057308 * g * (1 + 0.044715 * g * g))  # 2 sqrt(2 / pi) = 1.5957...
        derivative = slope + g * (slope * (1 - slope) * 1.5957691216057308 * (1 + 0.134145 * g * g))
    else:
        slope = 0.5 * (1 + tl.erf(g * 0.7071067811865476))
        derivative = slope + g * (0.3989422804014327 * tl.exp(-0.5 * g * g))
    return g * slope, derivative, factor, factor_derivative


@jit
def _relu2_forward_kernel(x, y, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < count, 0.0).to(tl.float32)
    value = tl.where(value < 0, 0.0, value)  # nan stays nan, as in torch
    tl.store(y + index, (value * value).to(y.dtype.element_ty), index < count)


@jit
def _relu2_backward_kernel(dy, x, dx, y, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < count, 0.0).to(tl.float32)
    gradient = tl.load(dy + index, index < count, 0.0).to(tl.float32)
    value = tl.where(value < 0, 0.0, value)
    tl.store(dx + index, (2 * value * gradient).to(dx.dtype.element_ty), index < count)
    if y is not None:
        tl.store(y + index, (value * value).to(y.dtype.element_ty), index < count)
