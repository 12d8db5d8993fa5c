"""`moe_experts` as operators of torch.compile, which cannot trace it: its rows per expert depend on the data.

Both operators expose static shapes only. They sort twice, so that nothing but h passes between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels.activations.gated import Activation, CappedSwiGLU, ClampedSwiGLU
from liger_models.kernels.experts._expert_order import sort_by_expert
from liger_models.kernels.experts._expert_passes import Wanted, activated_product, experts_backward, summed


@torch.library.custom_op("liger_models::moe_experts", mutates_args=())
def experts_operator(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    inputs: bool,
) -> tuple[Tensor, Tensor]:
    order, act = sort_by_expert(experts, len(gate_up)), _activation(activation, alpha, limit)
    product, _, h, _ = activated_product(x, weights, gate_up.contiguous, gate_up_bias, order, act, inputs)
    return summed(product, None, weights, down.contiguous, down_bias, order, inputs), h


@experts_operator.register_fake
def _(x, weights, experts, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit, inputs):
    return x.new_empty(x.shape), x.new_empty(experts.numel(), gate_up.shape[1])


@torch.library.custom_op("liger_models::moe_experts_backward", mutates_args=())
def _backward_operator(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    h: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    inputs: bool,
    wanted: list[bool],
) -> list[Tensor]:
    order, act = sort_by_expert(experts, len(gate_up)), _activation(activation, alpha, limit)
    operands = x, weights, experts, gate_up.contiguous, down.contiguous, down_bias, h
    grads = experts_backward(dy, *operands, order, act, inputs, Wanted(*wanted))[:-1]
    return [grad for grad in grads if grad is not None]


@_backward_operator.register_fake
def _(dy, x, weights, experts, gate_up, down, down_bias, h, activation, alpha, limit, inputs, wanted):
    num_experts, outputs, hidden = gate_up.shape
    shapes = (x.shape, None, gate_up.shape, down.shape, (num_experts, outputs), (num_experts, hidden))
    return [
        weights.new_empty(weights.shape) if shape is None else x.new_empty(shape)
        for shape, want in zip(shapes, wanted, strict=True)
        if want
    ]


def _activation(name: str, alpha: float, limit: float) -> Activation:
    if name == "capped_swiglu":
        return CappedSwiGLU(limit)
    clamped = ("clamped_swiglu_alone", "clamped_swiglu")
    return ClampedSwiGLU(alpha, limit, name == clamped[1]) if name in clamped else name


def _setup_context(ctx, inputs, output):
    x, weights, experts, gate_up, down, _, down_bias, *options = inputs
    ctx.save_for_backward(x, weights, experts, gate_up, down, down_bias, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _differentiate(ctx, dy, _):
    wanted = list(Wanted.of(ctx.needs_input_grad))
    found = iter(_backward_operator(dy, *ctx.saved_tensors, *ctx.options, wanted))
    dx, dweights, *dexperts = (next(found) if want else None for want in wanted)
    return dx, dweights, None, *dexperts, None, None, None, None


experts_operator.register_autograd(_differentiate, setup_context=_setup_context)
