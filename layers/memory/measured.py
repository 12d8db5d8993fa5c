"""Memory of a module's forward and backward pass, measured on the meta device."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_models.layers.parts.norm import LigerLayerNorm, LigerRMSNorm


class Measured(NamedTuple):
    """Bytes that a module saves, and that its backward pass takes at most in addition to them: the gradients
    of its output, its input and its parameters, and those in between.
    """

    saved: int
    backward: int


def measured(
    module: nn.Module, rows: int, width: int, dtype: torch.dtype, needs_input: bool, *others: Any
) -> Measured:
    """Memory of a module's call on [rows, width] and `others`. The module, on the meta device, is changed.

    Args:
        module: with parameters of this dtype.
        rows, width, dtype: of its input.
        needs_input: whether the input needs a gradient.
        *others: further arguments.
    """
    for norm in module.modules():
        if isinstance(norm, LigerRMSNorm | LigerLayerNorm):
            norm.forward = partial(_NormOnAGPU.apply, *norm.parameters())  # type: ignore[method-assign]
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x = torch.empty(rows, width, dtype=dtype, device="meta", requires_grad=needs_input)
    with torch.enable_grad(), _Live() as live:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            made = module(x, *others)
        own = {p.untyped_storage()._cdata for p in (*module.parameters(), *module.buffers())}
        total = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)
        saved.clear()
        before = live.peak = live.now
        results = made if isinstance(made, tuple) else (made,)
        if results[0].requires_grad:
            torch.autograd.backward(results, [torch.empty_like(x) for x in results])
    return Measured(total, live.peak - before)


class _NormOnAGPU(torch.autograd.Function):
    """A norm that saves what its kernel does: its input and two numbers a row. The plain twin saves more."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:
        *weights, x = operands
        ctx.save_for_backward(*weights, x, x.new_empty(2, *x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:-1])


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that are made within it, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return results

    def _follow(self, storage: Any) -> None:
        if (place := storage._cdata) not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self.now += self._sizes[place]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, place).atexit = False

    def _forget(self, place: int) -> None:
        self.now -= self._sizes.pop(place)
