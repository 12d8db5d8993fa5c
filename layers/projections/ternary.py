"""Linear layers whose weights are rounded to three values, and their inputs to 8 bits (BitNet b1.58: Ma et
al., 2024, arXiv:2402.17764, section 2).

    y = T(x) T(W)^T + b,   dx = dy T(W),   dW = dy^T T(x)        x [T, in], W [out, in]

    T(W) = clip(round(W / m), -1, 1) * m                   m = mean |W|
    T(x) = clip(round(x s), -128, 127) / s                 s = 127 / max |x|, of each row

Gradients pass through both roundings as if they were not there. m and the maxima are at least 1e-5. T is
computed in float32, and rounded to the dtype of W or x, in the order of operations of transformers'
`AutoBitLinear`. Where several projections are packed, each has a mean of its own, as have the checkpoint's.

Saved for the backward pass are x (or its recipe) and W, as in a plain layer: T(x) and T(W) are made again,
and exist during a product only. T takes float32 memory for a band of rows at a time; a mean, for its part of
W.

Checkpoints may hold T(W) in place of W, packed (convert/quantised/bitnet.py). Then only inputs are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.convert.errors import ConfigError
from liger_models.kernels._dispatch import once_differentiable, without_autocast
from liger_models.layers.projections.low_rank_plan import product_dtype
from liger_models.layers.specs.ternary import TernarySpec

SMALLEST = 1e-5  # of a mean or a maximum
BAND = 1 << 23  # elements of a band: 32 MiB in float32


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


@torch.no_grad()
def round_inputs(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """T(x) of x [..., in], in `dtype` or that of x."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=dtype or x.dtype, device=x.device)
    for band in _bands(rows):
        narrow = _at_most_float32(rows[band])
        low, high = torch.aminmax(narrow, dim=-1, keepdim=True)
        scale = 127 / torch.maximum(high, -low).float().clamp_(min=SMALLEST)
        # None exceeds 127, which the scale makes of the largest.
        _divide(torch.mul(narrow, scale).round_(), scale, out[band], x.dtype)
    return out.view(x.shape)


@torch.no_grad()
def round_weights(weight: Tensor, heights: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """T(W) of W [out, in], in `dtype` or that of W; each of the `heights` rows has a mean of its own."""
    parts = weight.split(list(heights))
    scales = [1.0 / part.to(torch.float32, copy=True).abs_().mean().clamp_(min=SMALLEST) for part in parts]
    out = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=weight.device)
    for part, scale, room in zip(parts, scales, out.split(list(heights)), strict=True):
        scale = scale.view(1, 1)  # a number would not make the product float32
        for band in _bands(part):
            wide = torch.mul(_at_most_float32(part[band]), scale).round_().clamp_(-1, 1)
            _divide(wide, scale, room[band], weight.dtype)
    return out


def _at_most_float32(band: Tensor) -> Tensor:
    """The band in a dtype whose product with float32 is float32."""
    return band.float() if band.dtype == torch.float64 else band


def _divide(wide: Tensor, scale: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Write wide / scale, rounded to `dtype`, to `out`, in one pass over memory where that is possible."""
    if dtype in (out.dtype, torch.float32, torch.float64):
        torch.div(wide, scale, out=out)
    else:
        out.copy_(wide.div_(scale).to(dtype))


def rounded_bytes(layer: Any, itemsize: int) -> int:
    """Bytes of T(W) during a product of a linear layer, or of the float32 copy for its mean, if that is
    more.
    """
    spec: TernarySpec | None = getattr(layer, "ternary", None)
    if spec is None or not spec.rounds_weights:
        return 0
    return int(layer.in_features * max(itemsize * layer.out_features, 4 * max(layer.heights)))


def band_bytes(elements: int) -> int:
    """Bytes in float32 of a band of rows that are rounded, of so many elements."""
    return 4 * min(BAND, elements)


def _bands(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, BAND // max(1, matrix.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


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
            return F.linear(round_inputs(x).to(operand.dtype), operand.of(weight), wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        operand, (of_x, of_weight) = ctx.operand, ctx.dtypes
        x, weight = ctx.node.saved_tensors
        _, _, want_x, want_weight, want_bias, _ = ctx.needs_input_grad
        dw = db = dx = None
        with without_autocast(dy):
            if want_weight:
                dw = (dy.T @ round_inputs(x).to(operand.dtype)).to(of_weight)
            del x  # rebuilt from a recipe, it need not coexist with dx
            if want_bias:
                db = dy.sum(0).to(ctx.of_bias)
            if want_x:
                dx = (dy @ operand.of(weight)).to(of_x)
        return None, None, dx, dw, db, None


class _Operand(NamedTuple):
    """How a weight becomes an operand of a product; the arguments are those of `ternary_linear`."""

    spec: TernarySpec
    heights: tuple[int, ...]
    dtype: torch.dtype
    dense: Callable[[Tensor], Tensor] | None

    def of(self, weight: Tensor) -> Tensor:
        """The operand [out, in], made of the weight."""
        if self.dense is not None:
            weight = self.dense(weight)
        if self.spec.rounds_weights:
            return round_weights(weight, self.heights, self.dtype)
        return weight.to(self.dtype)
