"""PEFT's LoRA layers on quantised ones, by our operation (QLoRA: Dettmers et al., 2023, arXiv:2305.14314).

    4 bits:  the operation of layers/projections/low_rank.py on the matrix that the weights stand for, which
             is made in forward and again in backward and never kept, in the dtype in which bitsandbytes
             multiplies
    8 bits:  bitsandbytes' product, and the low-rank paths added to it

As in hf/lora.py, layers are PEFT's own with another forward. PEFT's casts the input of every layer to the
adapters' float32 and keeps that copy; here the input is kept as it is, or as its recipe.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.hf.peft_layers import active_adapters, is_known
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.projections.low_rank import Projection, add_low_rank, low_rank_linear


def take_over(layer: nn.Module) -> None:
    """Run one of PEFT's LoRA layers on a quantised one by our operation, if it can."""
    kind = _kinds().get(type(layer))
    if kind is not None and is_known(layer):
        layer.__class__ = kind


@functools.cache
def _kinds() -> dict[type, type]:
    """Our class for each of PEFT's, which are there where bitsandbytes is."""
    from peft.tuners.lora import bnb

    kinds = {bnb.Linear4bit: FourBits, bnb.Linear8bitLt: EightBits}
    made: dict[type, type] = {
        theirs: type(f"LowRank{theirs.__name__}", (ours, theirs), {}) for theirs, ours in kinds.items()
    }
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

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        projection = None if args or kwargs else self.low_rank_projection()
        if projection is not None and projection.takes(x):
            return low_rank_linear(x, projection)
        out = _add_low_rank(self, x, *args, **kwargs)
        return super().forward(x, *args, **kwargs) if out is None else out  # type: ignore[misc]

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


class EightBits:
    """The forward that PEFT's layer on one of 8 bits gets."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        out = _add_low_rank(self, x, *args, **kwargs)
        return super().forward(x, *args, **kwargs) if out is None else out  # type: ignore[misc]


def _dense(state: Any, weight: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)
