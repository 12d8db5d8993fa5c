"""Operands of the experts' products: matrices stored in another form, the checks, and autocast's casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import autocasts, once_differentiable
from liger_models.kernels.activations.gated import Activation, CappedSwiGLU, ClampedSwiGLU, has_gate
from liger_models.kernels.experts._expert_paths import ExpertPath

Make = Callable[[], Tensor]
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


class StoredMatrices(NamedTuple):
    """Frozen matrices of experts that are stored in another form.

    Attributes:
        shape: [E, outputs, inputs] of the matrices.
        dtype: of the matrices.
        make: returns them, contiguous, the same bits in every call. It must not depend on autograd.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def made(matrices: Tensor | StoredMatrices) -> Tensor:
    return matrices.make() if isinstance(matrices, StoredMatrices) else matrices


def divide_gradient(x: Tensor, by: int) -> Tensor:
    """x, whose gradient is divided."""
    return _DividedGradient.apply(x, by)


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.by, None


def check_operands(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | StoredMatrices,
    down: Tensor | StoredMatrices,
    activation: Activation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    weighted: str,
) -> None:
    if not isinstance(activation, ClampedSwiGLU | CappedSwiGLU) and activation not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise ValueError(
            f"activation is {activation!r}; expected one of {names}, a ClampedSwiGLU or a CappedSwiGLU"
        )
    if x.dim() != 2 or weights.dim() != 2 or weights.shape != experts.shape or len(weights) != len(x):
        shapes = f"x is {tuple(x.shape)}, weights {tuple(weights.shape)}, experts {tuple(experts.shape)}"
        raise ValueError(f"{shapes}; expected [T, H], [T, k] and [T, k]")
    parts = 2 if has_gate(activation) else 1
    if len(gate_up.shape) != 3 or gate_up.shape[1] % parts or gate_up.shape[2] != x.shape[1]:
        rows = "2 I" if parts == 2 else "I"
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}; expected [E, {rows}, {x.shape[1]}]")
    num_experts, outputs, hidden = gate_up.shape
    if down.shape != (num_experts, hidden, outputs // parts):
        expected = f"{(num_experts, hidden, outputs // parts)}, which is [E, H, I]"
        raise ValueError(f"down is {tuple(down.shape)}; expected {expected}")
    for name, bias, width in (("gate_up_bias", gate_up_bias, outputs), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (num_experts, width):
            raise ValueError(f"{name} is {tuple(bias.shape)}; expected {(num_experts, width)}")
    biased = gate_up_bias is not None or down_bias is not None
    if weighted not in ("outputs", "inputs") or (weighted == "inputs" and biased):
        raise ValueError(f"weighted is {weighted!r}; expected 'outputs', or without biases 'inputs'")
    if experts.is_floating_point() or not weights.is_floating_point():
        raise TypeError(
            f"experts are {experts.dtype}, weights {weights.dtype}; expected integers and floating point"
        )


def check_paths(name: str, paths: Sequence[ExpertPath], matrices: Tensor | StoredMatrices) -> None:
    num_experts, outputs, inputs = matrices.shape
    for path in paths:
        (all_ranks, columns), (rows, ranks) = path.a.shape, path.b.shape
        if all_ranks != ranks or all_ranks % num_experts or (columns, rows) != (inputs, outputs):
            found = f"{tuple(path.a.shape)} and {tuple(path.b.shape)}"
            raise ValueError(
                f"{name} has a path of {found}; expected [{num_experts} r, {inputs}] and "
                f"[{outputs}, r {num_experts}]"
            )
        if not (path.a.is_floating_point() and path.b.is_floating_point()):
            found = f"{path.a.dtype} and {path.b.dtype}"
            raise TypeError(f"{name} has a path of {found}; expected floating point")


def cast_operands(x: Tensor, *operands: Tensor | StoredMatrices | None) -> tuple[Any, ...]:
    """Cast all operands of the products to autocast's dtype if it is on; otherwise require one dtype."""
    if autocasts(x) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        operands = tuple(t.to(dtype) if isinstance(t, Tensor) else t for t in operands)
    dtypes = [t.dtype for t in operands if t is not None]
    if any(dtype != x.dtype for dtype in dtypes):
        found = f"{x.dtype} and {', '.join(str(dtype) for dtype in dtypes)}"
        raise TypeError(
            f"x and the experts' matrices and biases are {found}; expected one floating dtype: cast them, or "
            "use autocast"
        )
    return x, *operands
