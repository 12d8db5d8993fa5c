"""The experts of a mixture of experts: gated MLPs, each of which sees only the tokens routed to it.

    y[t] = sum over slots j of weights[t, j] * down[e] @ (act(gate) * up),   gate, up = gate_up[e] @ x[t],
           e = experts[t, j]                                     (Mixtral, arXiv:2401.04088, section 2.1)

The T k assignments are sorted by expert, so that each matrix product is one launch over all experts
(`_grouped_products.py`), with whatever distribution and without the host waiting for it. With R = T k rows
h = [gate | up], a = act(gate) * up and dy the gradient of y:

    da = dy[t] @ down[e]                        (not yet weighted)
    dweights[t, j] = da . a                     which is dy . (down a), without making that again
    dh = weights[t, j] * da * (the activation's derivatives)
    dx[t] = sum over j of dh @ gate_up[e],  dgate_up[e] = sum of dh x^T,  ddown[e] = sum of dy (weights a)^T

Kept for the backward pass: the operands, h [R, 2 I] and the order of rows. Sums over slots are in float32 and
in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import as_rows, at_least_float32, once_differentiable, triton, use_triton
from liger_models.kernels.activations.gated import geglu, swiglu
from liger_models.kernels.experts._expert_order import ExpertOrder, sort_by_expert
from liger_models.kernels.experts._expert_rows import gated_backward, spread_rows, sum_slots
from liger_models.kernels.experts._grouped_products import rows_product, weight_product

_ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def moe_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Weighted sum over a token's experts of down(act(gate(x)) * up(x)).

    Args:
        x: [T, H], any floating dtype.
        weights: [T, k], any floating dtype; used in float32.
        experts: [T, k], integers in [0, E). A GPU does not check them: with others the result is undefined.
        gate_up: [E, 2 I, H], the gate's rows first, in x's dtype.
        down: [E, H, I], in x's dtype.
        activation: of the gate: "silu", "gelu_tanh" or "gelu".

    Under autocast x, gate_up and down may have any dtypes, and autocast's is taken. In a graph of
    torch.compile on a CPU, all experts compute all tokens.

    Returns:
        [T, H] in the dtype of the products. Running it again gives the same bits, gradients included; those
        are computed for the inputs that require them alone.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, tensors on several devices.
        TypeError: dtypes that do not fit.
        IndexError: an expert outside [0, E), on a CPU.
    """
    x, gate_up, down = _check(x, weights, experts, gate_up, down, activation)
    if torch.compiler.is_compiling():
        if triton is not None and x.is_cuda and x.dtype != torch.float64:
            return _operator(x, weights, experts, gate_up, down, activation)[0]
        return _dense(x, weights, experts, gate_up, down, activation)
    if use_triton(x, weights, experts, gate_up, down):
        return _Experts.apply(x, weights, experts, gate_up, down, activation)
    return moe_experts_plain(x, weights, experts, gate_up, down, activation)


def moe_experts_plain(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """The meaning of `moe_experts`, in plain PyTorch."""
    if experts.numel() and not 0 <= experts.min() <= experts.max() < len(gate_up):
        found = f"from {int(experts.min())} to {int(experts.max())}"
        raise IndexError(f"experts lie {found}; expected 0 to {len(gate_up) - 1}")
    y = torch.zeros_like(at_least_float32(x))
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        rows = F.linear(_gated(F.linear(x[token], gate_up[e]), activation), down[e])  # [n, H]
        weight = at_least_float32(weights[token, slot])
        y = y.index_add(0, token, (weight.unsqueeze(-1) * at_least_float32(rows)).to(y.dtype))
    return y.to(x.dtype)


def _dense(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """The same through all experts for all tokens: the one form without shapes that depend on data."""
    h = torch.einsum("th,eih->tei", x, gate_up)
    rows = at_least_float32(torch.einsum("tei,ehi->teh", _gated(h, activation), down))
    weights = at_least_float32(weights).to(rows.dtype)
    share = rows.new_zeros(len(x), len(gate_up)).scatter_add(1, experts.long(), weights)
    return torch.einsum("te,teh->th", share, rows).to(x.dtype)


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return swiglu(gate_up)
    return geglu(gate_up, approximate="tanh" if activation == "gelu_tanh" else "none")


def _check(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of the products, in autocast's dtype where it is on."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(_ACTIVATIONS)}")
    if x.dim() != 2 or weights.dim() != 2 or weights.shape != experts.shape or len(weights) != len(x):
        shapes = f"x is {tuple(x.shape)}, weights {tuple(weights.shape)}, experts {tuple(experts.shape)}"
        raise ValueError(f"{shapes}; expected [T, H], [T, k] and [T, k]")
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != x.shape[1]:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}; expected [E, 2 I, {x.shape[1]}]")
    expected = (len(gate_up), x.shape[1], gate_up.shape[1] // 2)
    if down.shape != expected:
        raise ValueError(f"down is {tuple(down.shape)}; expected {expected}, which is [E, H, I]")
    if experts.is_floating_point() or not weights.is_floating_point():
        raise TypeError(
            f"experts are {experts.dtype}, weights {weights.dtype}; expected integers and floating point"
        )
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        return x.to(dtype), gate_up.to(dtype), down.to(dtype)
    if not x.dtype == gate_up.dtype == down.dtype:
        dtypes = f"{x.dtype}, {gate_up.dtype} and {down.dtype}"
        raise TypeError(
            f"x, gate_up and down are {dtypes}; expected one floating dtype: cast them, or use autocast"
        )
    return x, gate_up, down


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, experts, gate_up, down, activation):
        order = sort_by_expert(experts, len(gate_up))
        y, h = _forward(x, weights, gate_up, down, order, activation)
        ctx.save_for_backward(x, weights, gate_up, down, h, *order[:_TENSORS])
        ctx.sizes = order[_TENSORS:]
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weights, gate_up, down, h, *order = ctx.saved_tensors
        order = ExpertOrder(*order, *ctx.sizes)
        want_x, want_weights, _, *want_experts, _ = ctx.needs_input_grad
        wanted = (want_x, want_weights, *want_experts)
        dx, dweights, dgate_up, ddown = _backward(
            dy, x, weights, gate_up, down, h, order, ctx.activation, *wanted
        )
        return dx, dweights, None, dgate_up, ddown, None


_TENSORS = 5  # of an ExpertOrder: its first fields


def _forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, order: ExpertOrder, activation: str
) -> tuple[Tensor, Tensor]:
    """The result [T, H], and h [R, 2 I]."""
    h = rows_product(as_rows(x), gate_up.contiguous(), order, transposed=True, gather=True)
    rows = rows_product(_gated(h, activation), down.contiguous(), order, transposed=True)  # [R, H]
    return sum_slots(rows, weights, order), h


def _backward(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    h: Tensor,
    order: ExpertOrder,
    activation: str,
    want_x: bool,
    want_weights: bool,
    want_gate_up: bool,
    want_down: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweights, dgate_up, ddown: those that are wanted. Buffers are freed as soon as they are used."""
    want_h = want_x or want_gate_up
    dx = dgate_up = ddown = dproduct = None
    dy = spread_rows(dy, order)  # [R, H]
    if want_h or want_weights:
        dproduct = rows_product(dy, down.contiguous(), order, transposed=False)  # [R, I]
    dh: Any
    product: Any
    dh, dweights, product = gated_backward(  # each None unless it is wanted
        dproduct, h, weights, order, activation, want_h, want_weights, want_down
    )
    del dproduct
    if want_down:
        ddown = weight_product(dy, product, order)
    del dy, product
    if want_gate_up:
        dgate_up = weight_product(dh, spread_rows(x, order), order)
    if want_x:
        dx = sum_slots(rows_product(dh, gate_up.contiguous(), order, transposed=False), None, order)
    return dx, dweights, dgate_up, ddown


# torch.compile cannot look into the layer: how many rows an expert has would be a shape that depends on data.
# These two operators show it shapes alone. They sort twice, so that nothing but h passes between them.


@torch.library.custom_op("liger_models::moe_experts", mutates_args=())
def _operator(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    return _forward(x, weights, gate_up, down, sort_by_expert(experts, len(gate_up)), activation)


@_operator.register_fake
def _(x, weights, experts, gate_up, down, activation):
    return x.new_empty(x.shape), x.new_empty(experts.numel(), gate_up.shape[1])


@torch.library.custom_op("liger_models::moe_experts_backward", mutates_args=())
def _backward_operator(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    h: Tensor,
    activation: str,
    wanted: list[bool],
) -> list[Tensor]:
    order = sort_by_expert(experts, len(gate_up))
    grads = _backward(dy, x, weights, gate_up, down, h, order, activation, *wanted)
    return [grad for grad in grads if grad is not None]


@_backward_operator.register_fake
def _(dy, x, weights, experts, gate_up, down, h, activation, wanted):
    operands = zip((x, weights, gate_up, down), wanted, strict=True)
    return [t.new_empty(t.shape) for t, want in operands if want]


def _setup_context(ctx, inputs, output):
    *operands, activation = inputs
    ctx.save_for_backward(*operands, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.activation = activation


def _differentiate(ctx, dy, _):
    x, weights, experts, gate_up, down, h = ctx.saved_tensors
    wanted = [want for i, want in enumerate(ctx.needs_input_grad[:5]) if i != 2]
    found = iter(_backward_operator(dy, x, weights, experts, gate_up, down, h, ctx.activation, wanted))
    dx, dweights, dgate_up, ddown = (next(found) if want else None for want in wanted)
    return dx, dweights, None, dgate_up, ddown, None


_operator.register_autograd(_differentiate, setup_context=_setup_context)
