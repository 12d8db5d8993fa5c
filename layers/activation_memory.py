"""What the forward pass keeps for the backward pass.

A norm's output or a gated product is cheap to make again from something that is kept anyway. Such a tensor
carries a `Recipe`: the function and the inputs that made it. While `keep_recipes()` is active, autograd's
saved-tensor hooks keep the recipe of a tensor that has one and the tensor itself otherwise. The consumer does
not matter (a plain linear layer, LoRA, a quantised layer), no matrix product is repeated, and the rebuilt
tensor has the same bits.

| level        | a layer keeps                                             | and computes again       |
|--------------|-----------------------------------------------------------|--------------------------|
| `all`        | everything                                                | nothing                  |
| `lean`       | input, q/k/v, attention output, residual, gate and up     | norms, the gated product |
| `mlp`        | input, q/k/v, attention output, the o_proj output         | also gate and up         |
| `checkpoint` | input                                                     | all but its last product |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import _global_forward_hooks
from torch.utils.checkpoint import checkpoint

ActivationMemory = Literal["all", "lean", "mlp", "checkpoint"]
LEVELS: tuple[ActivationMemory, ...] = ("all", "lean", "mlp", "checkpoint")


class _Kept:
    """A tensor as autograd would have saved it: without its graph, and with the check that nobody wrote into
    it.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # A leaf (a parameter) is kept as the object itself: sharding frameworks swap the data under it.
        # Anything else is detached, since an output that held itself through its own node would never be
        # freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} needed for the backward pass was modified in "
                f"place: it is at version {self.tensor._version}, expected {self.version}. Run backward() "
                "before changing it."
            )
        return self.tensor


class Recipe:
    """How to make a tensor again: `make(*inputs)`, without a graph."""

    __slots__ = ("_inputs", "_made", "_make")

    def __init__(self, make: Callable[..., Tensor], inputs: tuple[Tensor, ...]):
        self._make = make
        self._inputs = tuple(_Kept(tensor) for tensor in inputs)
        self._made: weakref.ref[Tensor] | None = None

    def get(self) -> Tensor:
        # Two consumers in a row (a frozen projection and its LoRA, say) share one rebuilt tensor while it
        # lives.
        made = self._made() if self._made is not None else None
        if made is None:
            with torch.no_grad():
                made = self._make(*(kept.get() for kept in self._inputs))
            self._made = weakref.ref(made)
        return made


def carry_recipe(output: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Note on `output` that `make(*inputs)` makes it again, bit for bit. Returns `output`."""
    if not torch.compiler.is_compiling() and output.requires_grad:
        output._recipe = Recipe(make, inputs)  # type: ignore[attr-defined]
    return output


def output_is_ours(module: nn.Module) -> bool:
    """Whether the memory of the module's output may be used again: a linear layer keeps none of it, and no
    hook of a user's has seen it. A wrapper around one may keep it, or need it for its own backward pass.
    """
    return isinstance(module, nn.Linear) and not (module._forward_hooks or _global_forward_hooks)


def _pack(tensor: Tensor) -> _Kept | Recipe:
    recipe = getattr(tensor, "_recipe", None)
    return _Kept(tensor) if recipe is None else recipe


def _unpack(packed: _Kept | Recipe) -> Tensor:
    return packed.get()


def keep_recipes() -> AbstractContextManager[Any]:
    """While active, autograd keeps recipes in place of the tensors that carry one."""
    return saved_tensors_hooks(_pack, _unpack)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)`, keep its inputs alone, and run it again in the backward pass.

    torch's own checkpoint, which stops the second run at the last tensor that backward needs: a matrix
    product at the end of `function` is not repeated.
    """
    return checkpoint(function, *args, use_reentrant=False)


def parse_levels(levels: str | list[str] | tuple[str, ...], num_layers: int) -> tuple[ActivationMemory, ...]:
    """One level a layer, from one name for all of them or a list of names.

    Raises:
        ValueError: an unknown level, or a list whose length is not the number of layers.
    """
    per_layer = (levels,) * num_layers if isinstance(levels, str) else tuple(levels)
    for level in per_layer:
        if level not in LEVELS:
            raise ValueError(f"unknown activation memory level {level!r}; choose one of {', '.join(LEVELS)}")
    if len(per_layer) != num_layers:
        raise ValueError(
            f"got {len(per_layer)} activation memory levels for {num_layers} layers; give one a layer"
        )
    return cast(tuple[ActivationMemory, ...], per_layer)
