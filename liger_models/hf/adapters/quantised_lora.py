"""PEFT's LoRA layers on quantised ones, by our operation (QLoRA: Dettmers et al., 2023, arXiv:2305.14314).

    4 bits:  the operation of layers/projections/low_rank.py on the matrix that the weights stand for, which
             is made in forward and again in backward and never kept, in the dtype in which bitsandbytes
             multiplies
    8 bits:  bitsandbytes' product, and the low-rank paths added to it. Its gradient, dx = dy W with
             W = CB * SCB / 127, reads only the weights, so nothing else is kept (bitsandbytes
             keeps the input)

As in hf/lora.py, layers are PEFT's own with another forward. PEFT's casts the input of every layer to the
adapters' float32 and keeps that copy; here the input is kept as it is, or as its recipe.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from liger_models.hf.adapters.peft_forward import keep_input_alone
from liger_models.hf.adapters.peft_layers import active_adapters, costs_of, is_known
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.projections.low_rank import add_low_rank, low_rank_linear
from liger_models.layers.projections.low_rank_plan import Projection
from liger_models.layers.recompute.activation_memory import ActivationMemory


def take_over(layer: nn.Module) -> None:
    """Run one of PEFT's LoRA layers on a quantised one by our operation, if it can; and keep nothing of the
    product of a layer of 8 bits.
    """
    kinds, theirs = _kinds(), type(layer)
    if theirs in kinds and (not hasattr(layer, "lora_A") or is_known(layer)):
        change_class(layer, kinds[theirs])


@functools.cache
def _kinds() -> dict[type, type]:
    """Our class for each of PEFT's, which are there where bitsandbytes is."""
    from bitsandbytes.nn import Linear8bitLt
    from peft.tuners.lora import bnb

    kinds = {bnb.Linear4bit: FourBits, bnb.Linear8bitLt: EightBits}
    made: dict[type, type] = {
        theirs: type(f"LowRank{theirs.__name__}", (ours, theirs), {}) for theirs, ours in kinds.items()
    }
    made[Linear8bitLt] = type("LeanLinear8bitLt", (EightBitProduct, Linear8bitLt), {})
    globals().update({kind.__name__: kind for kind in made.values()})  # where pickle looks for them
    return made


def _add_low_rank(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """The base layer's own product and the paths, or None where PEFT's forward must run."""
    adapters = None if args or kwargs else active_adapters(layer)
    if not adapters or torch.is_autocast_enabled(x.device.type):
        return None
    return add_low_rank(layer.base_layer(x), x, adapters, in_place=not has_hooks(layer.base_layer))


class FourBits:
    """The forward that PEFT's layer on one of 4 bits gets."""

    base_layer: Any
    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        projection = None if args or kwargs else self.low_rank_projection()
        if projection is not None and projection.takes(x):
            return low_rank_linear(x, projection)
        out = _add_low_rank(self, x, *args, **kwargs)
        return keep_input_alone(self, super().forward, x, *args, **kwargs) if out is None else out  # type: ignore[misc]

    def low_rank_projection(self) -> Projection | None:
        """The layer as layers/projections/low_rank.py takes it, or None where the base layer must be called:
        where no gradient is wanted, bitsandbytes multiplies few tokens faster.
        """
        base = self.base_layer
        state = getattr(base.weight, "quant_state", None)
        adapters = active_adapters(self) if torch.is_grad_enabled() and not has_hooks(base) else None
        if not adapters or state is None or getattr(state, "packing_format_for_cpu", False):
            return None
        dtype = base.compute_dtype if base.compute_type_is_set else None
        return Projection(base.weight, base.bias, adapters, functools.partial(_dense, state), dtype)

    def adapter_costs(self) -> dict[str, Any]:
        """As layers/memory/adapters.py asks."""
        return costs_of(self, active_adapters(self))


class EightBits:
    """The forward that PEFT's layer on one of 8 bits gets."""

    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        out = _add_low_rank(self, x, *args, **kwargs)
        return keep_input_alone(self, super().forward, x, *args, **kwargs) if out is None else out  # type: ignore[misc]

    def adapter_costs(self) -> dict[str, Any]:
        """As layers/memory/adapters.py asks."""
        return costs_of(self, active_adapters(self)) | {"eight_bits": True}


class EightBitProduct:
    """The forward that a linear layer of 8 bits gets."""

    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        if torch.compiler.is_compiling() or self.weight.requires_grad:
            return super().forward(x)  # type: ignore[misc]
        return _EightBitProduct.apply(x, self.bias, self, super().forward)  # type: ignore[misc]


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Any, product: Any) -> Tensor:
        y = product(x)
        ctx.state, ctx.shape, ctx.dtype = layer.state, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dbias = None
        rows, state = dy.reshape(-1, dy.shape[-1]), ctx.state
        if ctx.needs_input_grad[1]:
            dbias = rows.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB[:, None] * (1.0 / 127.0))
            dx = (rows.to(ctx.dtype) @ weight).view(ctx.shape)
        return dx, dbias, None, None


def _dense(state: Any, weight: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)
