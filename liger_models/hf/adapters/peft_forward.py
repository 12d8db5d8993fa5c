"""PEFT's own forward of a layer, recomputed so that only the input is kept for the backward pass.

It runs where our operation does not apply: DoRA, `lora_bias` and other LoRA variants, torchao weights, IA3.
PEFT's code casts inputs and keeps several tensors as wide as the output. Running it again in the backward
pass avoids that, for one more matrix product. At activation memory level `all` nothing is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from liger_models.hf.adapters.peft_layers import costs_of
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.recompute.activation_memory import ActivationMemory, recompute


def keep_input_alone(
    layer: Any, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run PEFT's own forward(x, *args, **kwargs) of this layer, keeping only its input.

    Raises:
        RuntimeError: in the backward pass, if other adapters are active than in the forward pass.
    """
    plain = not args and not kwargs and not layer.disable_adapters and not layer.merged
    if not plain or layer.activation_memory == "all" or any(map(has_hooks, _parts(layer))):
        return forward(x, *args, **kwargs)
    expected = _state(layer)

    def run(x: Tensor) -> Tensor:
        if (found := _state(layer)) != expected:
            raise RuntimeError(
                f"a {type(layer).__name__} runs again in the backward pass with {found}, but ran with "
                f"{expected}; call backward() before switching adapters, or set_activation_memory('all')"
            )
        return forward(x)

    return recompute(run, x)


class KeepsInputAlone:
    """PEFT layer with `keep_input_alone` as its forward."""

    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [..., in] to [..., out]."""
        return keep_input_alone(self, super().forward, x, *args, **kwargs)  # type: ignore[misc]

    def low_rank_projection(self) -> None:
        """Return None: layers/projections/low_rank.py does not cover this layer."""

    def adapter_costs(self) -> dict[str, Any]:
        """Memory costs for layers/memory/adapters.py."""
        return costs_of(self, None)


def take_over(layer: nn.Module) -> None:
    """Make a linear layer of IA3, or of LoRA on torchao weights, keep only its input."""
    theirs: Any = type(layer)
    if theirs.__module__ in _HOMES and "Linear" in theirs.__name__:
        change_class(layer, _ours(theirs))


_HOMES = ("peft.tuners.ia3.layer", "peft.tuners.ia3.bnb", "peft.tuners.lora.torchao")


@functools.cache
def _ours(theirs: Any) -> type:
    ours = type(
        f"Lean{theirs.__module__.split('.')[2].upper()}{theirs.__name__}", (KeepsInputAlone, theirs), {}
    )
    ours.__module__ = __name__  # for pickle
    globals()[ours.__name__] = ours
    return ours


def _parts(layer: nn.Module) -> list[nn.Module]:
    return [part for part in layer.modules() if part is not layer]


def _state(layer: Any) -> dict[str, Any]:
    """Return the switches that affect the result."""
    return {
        "adapters": tuple(layer.active_adapters),
        "disabled": layer.disable_adapters,
        "merged": tuple(layer.merged_adapters),
        "training": layer.training,
        "scaling": dict(getattr(layer, "scaling", {})),
    }
