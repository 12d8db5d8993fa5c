"""A gated activation, or the squared ReLU, and the linear layer after it, as one operation.

    h = act(gate) * up, or max(x, 0)^2;   y = s h W^T + b
    dh = s dy W,   dgate, dup from dh,   dW = s dy^T h,   db = sum of dy

Only gate and up are kept. The backward pass makes h again in the kernel that computes their gradients, in the
memory of dh: as two operations, one more kernel would read gate and up, and h and dh would exist at once. For
I inputs of the linear layer a row, the kernels move 3 I elements in the forward pass and 6 I in the backward
pass, instead of 8 I; for the squared ReLU 2 I and 4 I, instead of 5 I.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import as_once_differentiable, once_differentiable, use_triton
from liger_models.kernels.activations.gated import (
    Activation,
    gated_plain,
    has_gate,
    launch_backward,
    launch_forward,
    launch_relu2_backward,
    launch_relu2_forward,
    relu2_plain,
    room_for_gradient,
)
from liger_models.kernels.scaled_linear import scaled_product


def gated_linear(
    gate_up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    *,
    reuse_input: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """linear(act(gate) * up, weight, bias), with the bits of the two operations one after the other.

    Args:
        gate_up: [T, 2 I], gate first; [T, I] if the activation has no gate.
        weight: [H, I]; bias: [H] or None; of gate_up's dtype.
        activation: as of `gated_plain`, or "relu2".
        reuse_input: as of `swiglu`.
        scale: a factor of the product with the weight; any but one requires that there is no bias.

    Returns:
        [T, H].
    """
    if scale != 1.0 and bias is not None:
        raise ValueError(f"scale is {scale}, and there is a bias; scale the result instead")
    if not use_triton(gate_up, weight, bias):
        return gated_linear_plain(gate_up, weight, bias, activation, scale)
    return _GatedLinear.apply(gate_up, weight, bias, activation, reuse_input, scale)


def gated_linear_plain(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, scale: float = 1.0
) -> Tensor:
    """Plain twin of `gated_linear`."""
    product = gated_plain(gate_up, None, activation) if has_gate(activation) else relu2_plain(gate_up)
    y = F.linear(as_once_differentiable(product), weight, bias)
    return y if scale == 1.0 else y * scale


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation,
        reuse_input: bool,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.activation, ctx.reuse_input, ctx.scale = activation, reuse_input, scale
        product = gate_up.new_empty(len(gate_up), weight.shape[1])
        _make_product(gate_up, product, activation)
        return F.linear(product, weight, bias) if scale == 1.0 else scaled_product(product, weight.t(), scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        want_gate_up, want_weight, want_bias, *_ = ctx.needs_input_grad
        dgate_up = dweight = None
        width = weight.shape[1]
        product = scaled_product(dy, weight, ctx.scale) if want_gate_up else gate_up.new_empty(len(dy), width)
        if want_gate_up:  # the gradient of the product, and then the product
            dgate_up = room_for_gradient(gate_up, ctx.reuse_input)
            again = product if want_weight else None
            if has_gate(ctx.activation):
                launch_backward(product, gate_up, None, dgate_up, None, ctx.activation, again)
            else:
                launch_relu2_backward(product, gate_up, dgate_up, again)
        elif want_weight:
            _make_product(gate_up, product, ctx.activation)
        if want_weight:
            dweight = scaled_product(dy.t(), product, ctx.scale)
        return dgate_up, dweight, dy.sum(0) if want_bias else None, *(None,) * 3


def _make_product(gate_up: Tensor, product: Tensor, activation: Activation) -> None:
    if has_gate(activation):
        launch_forward(gate_up, None, product, activation)
    else:
        launch_relu2_forward(gate_up, product)
