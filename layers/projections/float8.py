"""Linear layers whose products run in float8, with scales computed anew for each product.

    y  = Q(x) Q(W)^T + b        x [T, in] and W [out, in] by rows
    dx = Q(dy) Q(W^T)^T         dy by rows, W by columns
    dW = Q(dy)^T Q(x)           the same dy and x

With a scale r_t for each row of dy and s_t for each row of x, dW = sum over t of (r_t s_t q_t) p_t^T, where q
and p are the float8 numbers: p is transposed as it is, and r s q, with its powers of two, is quantised by
columns, which changes a number only if it becomes subnormal. So dy and x are rounded once, read once, and
have copies by rows alone, which the operation before may have made (kernels/float8/copies.py). With one scale
for each matrix, dy and x are quantised for each product.

Weights, activations and gradients keep their dtype outside of these products, and so do checkpoints and the
optimizer. Saved for the backward pass are x (or its recipe) and W, as in a plain layer.

| recipe             | scales                        | dtypes                               | dW       |
|--------------------|-------------------------------|--------------------------------------|----------|
| rowwise            | one for each row or column    | e4m3                                 | float8   |
| rowwise_with_gw_hp | one for each row or column    | e4m3                                 | bfloat16 |
| tensorwise         | one for each matrix           | e4m3, gradients of outputs in e5m2   | float8   |

The names are torchao's. Scales are powers of two (kernels/float8/quantize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from liger_models.kernels._dispatch import once_differentiable
from liger_models.kernels.float8.copies import carried_rows
from liger_models.kernels.float8.product import float8_product, has_float8_products
from liger_models.kernels.float8.quantize import ALIGNMENT, Float8, quantize, quantize_columns, turned
from liger_models.layers.projections.gathered import GatheredWeight
from liger_models.layers.projections.weight_copies import WeightCopies

Float8Recipe = Literal["rowwise", "tensorwise", "rowwise_with_gw_hp"]
RECIPES: tuple[Float8Recipe, ...] = get_args(Float8Recipe)


@dataclass(frozen=True)
class Float8Settings:
    """How a layer runs in float8.

    Attributes:
        recipe: one of `RECIPES`.
        emulate: compute the products of quantised operands in float32, on any device, for tests.
        copies: the weights' copies, while they are kept between micro-batches (`keep_float8_weights`).
    """

    recipe: Float8Recipe
    emulate: bool = False
    copies: WeightCopies = field(default_factory=WeightCopies, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"float8 is {self.recipe!r}; expected one of {', '.join(RECIPES)}")

    @property
    def one_scale(self) -> bool:
        """Whether a matrix has one scale, and not one for each row."""
        return self.recipe == "tensorwise"


def fits_float8(*sizes: int) -> bool:
    """Whether float8 products can have these widths."""
    return not any(size % ALIGNMENT for size in sizes)


def runs_in_float8(layer: nn.Module) -> bool:
    """Whether a layer's products run in float8."""
    return getattr(layer, "float8", None) is not None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Float8Settings) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x: [..., in], bfloat16, or any dtype under autocast to bfloat16.
        weight: [out, in]; both widths multiples of 16.
        bias: [out] or None.
        settings: the recipe.

    Raises:
        RuntimeError: the device has no float8 products.
        TypeError: another dtype than bfloat16.
    """
    device = x.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        x, weight = (
            x.to(dtype),
            weight.to(dtype),
        )  # a cast weight is no parameter, and its copies are not kept
    check_float8(device, x.dtype, weight.dtype, settings)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    with torch.autocast(device.type, enabled=False):
        y = _Float8Linear.apply(rows, weight, settings)
    y = y if bias is None else y + bias.to(y.dtype)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


def check_float8(device: torch.device, x: torch.dtype, weight: torch.dtype, settings: Float8Settings) -> None:
    """Check that products of these dtypes can run in float8 on this device.

    Raises:
        RuntimeError: the device has no float8 products.
        TypeError: another dtype than bfloat16.
    """
    if not settings.emulate and not has_float8_products(device):
        raise RuntimeError(
            "the model runs in float8, which needs an NVIDIA GPU of compute capability 9.0 or above, but its "
            f"input is on {_describe(device)}; call set_float8(None), or move the model"
        )
    if x != weight or not (x == torch.bfloat16 or settings.emulate):
        raise TypeError(
            f"the model runs in float8, but the input of a layer is {x} and its weight {weight}; expected "
            "bfloat16: load the model with dtype='bfloat16', or call set_float8(None)"
        )


def _describe(device: torch.device) -> str:
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else f"the {device.type}"
    )


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: Float8Settings) -> Tensor:
        ctx.settings = settings
        rows = _carried(x, settings)
        if not ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight)
        elif rows is None or settings.recipe == "rowwise_with_gw_hp":
            ctx.save_for_backward(weight, x)
        else:
            ctx.save_for_backward(weight, *rows)
        return forward_product(x, weight, settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        settings: Float8Settings = ctx.settings
        gradient = Gradient(dy, settings, want_x, want_weight)
        dw = gradient.weight_product(kept[0] if len(kept) == 1 else Float8(*kept)) if want_weight else None
        del kept  # rebuilt from a recipe, it need not coexist with dx
        return gradient.input_product(weight) if want_x else None, dw, None


def forward_product(
    x: Tensor, weight: Tensor | Float8, settings: Float8Settings, of: Sequence[Tensor] = ()
) -> Tensor:
    """x [T, in] @ weight^T, [T, out] in x's dtype. A weight in e4m3 has a scale for each row. `of`: the
    parameters of which a weight that is no parameter itself is a view.
    """
    rows = _carried(x, settings) or _by_rows(x, settings.one_scale)
    if isinstance(weight, GatheredWeight):
        of_weight = weight.rows
    elif isinstance(weight, Float8):
        of_weight = weight
    else:
        matrix = weight
        of_weight = settings.copies.get("rows", of or (weight,), lambda: _by_rows(matrix, settings.one_scale))
    return float8_product(rows, of_weight, x.dtype)


def input_gradient(
    dy: Tensor, weight: Tensor | Float8, settings: Float8Settings, of: Sequence[Tensor] = ()
) -> Tensor:
    """dy [T, out] @ weight, [T, in] in dy's dtype."""
    return Gradient(dy, settings, True, False).input_product(weight, of)


def weight_gradient(dy: Tensor, x: Tensor, settings: Float8Settings) -> Tensor:
    """dy [T, out]^T @ x [T, in], [out, in] in dy's dtype."""
    return Gradient(dy, settings, False, True).weight_product(x)


class Gradient:
    """The gradient dy [T, out] of a product's result, quantised for the products that are wanted."""

    def __init__(self, dy: Tensor, settings: Float8Settings, want_x: bool, want_weight: bool):
        self.dy, self.settings = dy, settings
        self.rows: Float8 | None = None
        self.columns: Float8 | None = None
        want_weight = want_weight and settings.recipe != "rowwise_with_gw_hp"
        if settings.one_scale:
            self.rows, self.columns = quantize(
                dy, by_rows=want_x, by_columns=want_weight, dtype=torch.float8_e5m2, one_scale=True
            )
        elif want_x or want_weight:
            self.rows = carried_rows(dy) or _by_rows(dy, False)

    def weight_product(self, x: Tensor | Float8) -> Tensor:
        """dy^T @ x, [out, in] in dy's dtype, of x [T, in] or its copy by rows."""
        dtype, one_scale = self.dy.dtype, self.settings.one_scale
        if self.settings.recipe == "rowwise_with_gw_hp":
            assert isinstance(x, Tensor)
            return self.dy.T @ x
        if self.columns is not None:
            assert isinstance(x, Tensor)
            return float8_product(self.columns, _by_columns(x, one_scale), dtype)
        assert self.rows is not None
        x8 = x if isinstance(x, Float8) else _by_rows(x, one_scale)
        columns = quantize_columns(self.rows.values, self.rows.scales * x8.scales)
        return float8_product(columns, turned(x8), dtype)

    def input_product(self, weight: Tensor | Float8, of: Sequence[Tensor] = ()) -> Tensor:
        """dy @ weight [out, in], [T, in] in dy's dtype. `of`: as for `forward_product`."""
        assert self.rows is not None
        if isinstance(weight, GatheredWeight):
            columns = weight.columns()
        elif isinstance(weight, Float8):
            columns = quantize_columns(weight.values, weight.scales)
        else:
            matrix, one_scale = weight, self.settings.one_scale
            columns = self.settings.copies.get(
                "columns", of or (weight,), lambda: _by_columns(matrix, one_scale)
            )
        return float8_product(self.rows, columns, self.dy.dtype)


def _carried(x: Tensor, settings: Float8Settings) -> Float8 | None:
    return None if settings.one_scale else carried_rows(x)


def _by_rows(x: Tensor, one_scale: bool) -> Float8:
    return cast(Float8, quantize(x, one_scale=one_scale)[0])


def _by_columns(x: Tensor, one_scale: bool) -> Float8:
    return cast(Float8, quantize(x, by_rows=False, by_columns=True, one_scale=one_scale)[1])
