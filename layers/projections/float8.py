"""Linear layers whose products run in float8, with scales computed anew for each product.

    y  = Q(x) Q(W)^T + b        x [T, in] and W [out, in] by rows
    dx = Q(dy) Q(W^T)^T         dy by rows, W by columns
    dW = Q(dy^T) Q(x^T)^T       dy and x by columns

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

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from liger_models.kernels._dispatch import once_differentiable
from liger_models.kernels.float8.product import float8_product, has_float8_products
from liger_models.kernels.float8.quantize import ALIGNMENT, Float8, quantize

Float8Recipe = Literal["rowwise", "tensorwise", "rowwise_with_gw_hp"]
RECIPES: tuple[Float8Recipe, ...] = get_args(Float8Recipe)


@dataclass(frozen=True)
class Float8Settings:
    """How a layer runs in float8.

    Attributes:
        recipe: one of `RECIPES`.
        emulate: compute the products of quantised operands in float32, on any device, for tests.
    """

    recipe: Float8Recipe
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"float8 is {self.recipe!r}; expected one of {', '.join(RECIPES)}")


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
    if not settings.emulate and not has_float8_products(device):
        raise RuntimeError(
            "the model runs in float8, which needs an NVIDIA GPU of compute capability 9.0 or above, but its "
            f"input is on {_describe(device)}; call set_float8(None), or move the model"
        )
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype or not (x.dtype == torch.bfloat16 or settings.emulate):
        raise TypeError(
            f"the model runs in float8, but the input of a layer is {x.dtype} and its weight {weight.dtype}; "
            "expected bfloat16: load the model with dtype='bfloat16', or call set_float8(None)"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    with torch.autocast(device.type, enabled=False):
        y = _Float8Linear.apply(rows, weight, settings)
    y = y if bias is None else y + bias.to(y.dtype)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


def _describe(device: torch.device) -> str:
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else f"the {device.type}"
    )


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: Float8Settings) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(x, weight)
        one_scale = settings.recipe == "tensorwise"
        return float8_product(_by_rows(x, one_scale), _by_rows(weight, one_scale), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        recipe = ctx.settings.recipe
        one_scale, narrow = recipe == "tensorwise", recipe != "rowwise_with_gw_hp"
        dtype = torch.float8_e5m2 if one_scale else torch.float8_e4m3fn
        rows, columns = quantize(
            dy, by_rows=want_x, by_columns=want_weight and narrow, dtype=dtype, one_scale=one_scale
        )
        dx = dw = None
        if want_weight and columns is not None:
            dw = float8_product(columns, _by_columns(x, one_scale), weight.dtype)
        elif want_weight:
            dw = dy.T @ x
        del x  # rebuilt from a recipe, it need not coexist with dx
        if rows is not None:
            dx = float8_product(rows, _by_columns(weight, one_scale), dy.dtype)
        return dx, dw, None


def _by_rows(x: Tensor, one_scale: bool) -> Float8:
    return cast(Float8, quantize(x, one_scale=one_scale)[0])


def _by_columns(x: Tensor, one_scale: bool) -> Float8:
    return cast(Float8, quantize(x, by_rows=False, by_columns=True, one_scale=one_scale)[1])
