"""PEFT's LoRA on quantised layers, run by our operation (QLoRA: Dettmers et al., 2023, arXiv:2305.14314).

    4 bits:  the operation of layers/projections/low_rank.py on the dequantised matrix, which is computed in
             forward and again in backward, in bitsandbytes' compute dtype, and never kept
    8 bits:  bitsandbytes' product plus the low-rank paths. Its gradient, dx = dy W with W = CB * SCB / 127,
             reads only the weights, so nothing else is kept (bitsandbytes keeps the input)

As in lora.py, layers are PEFT's own with another forward. PEFT casts the input of every layer to the
adapters' float32 and keeps that copy; here the input, or the recipe to recompute it, is kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from liger_models.hf.adapters.peft_forward import keep_input_alone
from liger_models.hf.adapters.peft_layers import active_adapters, add_paths, costs_of, is_known
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.projections.low_rank import low_rank_linear
from liger_models.layers.projections.low_rank_plan import Projection
from liger_models.layers.recompute.activation_memory import ActivationMemory


def take_over(layer: nn.Module) -> None:
    """Run a PEFT LoRA layer on a quantised base by our operation where possible. The product of an 8-bit
    layer then keeps no input for backward.
    """
    kinds, theirs = _kinds(), type(layer)
    if theirs in kinds and (not hasattr(layer, "lora_A") or is_known(layer)):
        change_class(layer, kinds[theirs])


@functools.cache
def _kinds() -> dict[type, type]:
    """Map PEFT's bitsandbytes classes to ours."""
    from bitsandbytes.nn import Linear8bitLt
    from peft.tuners.lora import bnb

    kinds = {bnb.Linear4bit: FourBits, bnb.Linear8bitLt: EightBits}
    made: dict[type, type] = {
        theirs: type(f"LowRank{theirs.__name__}", (ours, theirs), {}) for theirs, ours in kinds.items()
    }
    made[Linear8bitLt] = type("LeanLinear8bitLt", (EightBitProduct, Linear8bitLt), {})
    globals().update({kind.__name__: kind for kind in made.values()})  # for pickle
    return made


class FourBits:
    """Forward of PEFT's layer on a 4-bit layer."""

    base_layer: Any
    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of x."""
        projection = None if args or kwargs else self.low_rank_projection()
        if projection is not None and projection.takes(x):
            return low_rank_linear(x, projection)
        out = add_paths(self, x, *args, **kwargs)
        return keep_input_alone(self, super().forward, x, *args, **kwargs) if out is None else out  # type: ignore[misc]

    def low_rank_projection(self) -> Projection | None:
        """Return the layer for layers/projections/low_rank.py, or None where the base layer must be called.
        Without gradients, bitsandbytes is faster for few tokens.
        """
        base = self.base_layer
        state = getattr(base.weight, "quant_state", None)
        adapters = active_adapters(self) if torch.is_grad_enabled() and not has_hooks(base) else None
        if not adapters or state is None or getattr(state, "packing_format_for_cpu", False):
            return None
        dtype = base.compute_dtype if base.compute_type_is_set else None
        return Projection(base.weight, base.bias, adapters, functools.partial(_dense, state), dtype)

    def adapter_costs(self) -> dict[str, Any]:
        """Memory costs for layers/memory/adapters.py."""
        return costs_of(self, active_adapters(self))


class EightBits:
    """Forward of PEFT's layer on an 8-bit layer."""

    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of x."""
        out = add_paths(self, x, *args, **kwargs)
        return keep_input_alone(self, super().forward, x, *args, **kwargs) if out is None else out  # type: ignore[misc]

    def adapter_costs(self) -> dict[str, Any]:
        """Memory costs for layers/memory/adapters.py."""
        return costs_of(self, active_adapters(self)) | {"eight_bits": True}


class EightBitProduct:
    """Forward of an 8-bit linear layer."""

    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of x."""
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
