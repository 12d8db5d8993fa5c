"""Linear layers whose weights are rounded to three values, and their inputs to 8 bits (BitNet b1.58: Ma et
al., 2024, arXiv:2402.17764, section 2).

    y = T(x) T(W)^T + b,   dx = dy T(W),   dW = dy^T T(x)        x [T, in], W [out, in]

T is in kernels/quantised/ternary.py. Gradients pass through both roundings as if they were not there. Where
several projections are packed, each has a mean of its own, as have the checkpoint's.

Saved for the backward pass are x (or its recipe) and W, as in a plain layer, and one scale for each mean:
T(x) and T(W) are made again, and exist during a product only.

Checkpoints may hold T(W) in place of W, packed (convert/quantised/bitnet.py). Then only inputs are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.convert.errors import ConfigError
from liger_models.kernels import round_inputs, round_weights, weight_scales
from liger_models.kernels._dispatch import once_differentiable, without_autocast
from liger_models.layers.projections.low_rank_plan import product_dtype
from liger_models.layers.specs.ternary import TernarySpec


def is_ternary(layer: Any) -> bool:
    """Whether a layer's products are of rounded operands."""
    return getattr(layer, "ternary", None) is not None


def check_can_merge(layer: Any) -> None:
    """Check that an adapter can be added to a layer's weight.

    Raises:
        ConfigError: the layer rounds its weight, and would round the sum.
    """
    if is_ternary(layer):
        raise ConfigError(
            f"an adapter cannot be merged into a {type(layer).__name__} that rounds its weight to three "
            "values (quantization_config): the sum would be rounded, and be another function. Keep the "
            "adapter apart"
        )


def ternary_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: TernarySpec,
    heights: Sequence[int],
    dense: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """x [..., in] -> [..., out], in the dtype of x or of autocast.

    Args:
        x: [..., in], in the dtype of the weight, except under autocast.
        weight: [out, in].
        bias: [out], or None.
        spec: which operands are rounded.
        heights: the rows of each weight that is rounded by itself; their sum is `out`.
        dense: of a frozen weight in another form, as in `low_rank_plan.Projection`.

    Raises:
        RuntimeError: incompatible dtypes or shapes, as from torch's linear layer.
    """
    dtype = product_dtype(x)
    if torch.compiler.is_compiling():
        return plain_ternary_linear(x, weight if dense is None else dense(weight), bias, spec, heights)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    kept = _Keep.apply(rows, weight)
    operand = _Operand(spec, tuple(heights), dtype, dense)
    y = _Product.apply(kept, kept.grad_fn, rows, weight, bias, operand)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


def plain_ternary_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: TernarySpec, heights: Sequence[int]
) -> Tensor:
    """Plain twin of `ternary_linear`, in torch's own operations, which save T(x) and T(W)."""
    dtype = product_dtype(x)
    w = _Straight.apply(weight, round_weights(weight, heights)) if spec.rounds_weights else weight
    y = _Straight.apply(x, round_inputs(x)).to(dtype)
    return F.linear(y, w.to(dtype), None if bias is None else bias.to(dtype))


def rounded_bytes(layer: Any, itemsize: int) -> int:
    """Bytes of T(W) during a product of a linear layer; |W|, for a mean, takes no more."""
    spec: TernarySpec | None = getattr(layer, "ternary", None)
    if spec is None or not spec.rounds_weights:
        return 0
    return int(itemsize * layer.in_features * layer.out_features)


class _Straight(torch.autograd.Function):
    """`rounded`, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Keep(torch.autograd.Function):
    """Saves the operands for `_Product`, which saves nothing: a layer recomputed in the backward pass stops
    at the last saved tensor, and so before the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.set_materialize_grads(False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kept: Tensor,
        node: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operand: _Operand,
    ) -> Tensor:
        ctx.node, ctx.operand, ctx.dtypes = node, operand, (x.dtype, weight.dtype)
        ctx.of_bias = None if bias is None else bias.dtype
        with without_autocast(x):
            wide = None if bias is None else bias.to(operand.dtype)
            matrix, ctx.scales = operand.of(weight)
            return F.linear(round_inputs(x, operand.dtype), matrix, wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        operand, (of_x, of_weight) = ctx.operand, ctx.dtypes
        x, weight = ctx.node.saved_tensors
        _, _, want_x, want_weight, want_bias, _ = ctx.needs_input_grad
        dw = db = dx = None
        with without_autocast(dy):
            if want_weight:
                dw = (dy.T @ round_inputs(x, operand.dtype)).to(of_weight)
            del x  # rebuilt from a recipe, it need not coexist with dx
            if want_bias:
                db = dy.sum(0).to(ctx.of_bias)
            if want_x:
                dx = (dy @ operand.of(weight, ctx.scales)[0]).to(of_x)
        return None, None, dx, dw, db, None


class _Operand(NamedTuple):
    """How a weight becomes an operand of a product; the arguments are those of `ternary_linear`."""

    spec: TernarySpec
    heights: tuple[int, ...]
    dtype: torch.dtype
    dense: Callable[[Tensor], Tensor] | None

    def of(
        self, weight: Tensor, scales: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The operand [out, in], made of the weight, and the scales of its parts, unless they are given."""
        if self.dense is not None:
            weight = self.dense(weight)
        if not self.spec.rounds_weights:
            return weight.to(self.dtype), ()
        if scales is None:
            scales = weight_scales(weight, self.heights)
        return round_weights(weight, self.heights, self.dtype, scales), scales
