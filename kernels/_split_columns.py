"""Columns of a matrix, whose gradients are written next to each other.

    a, b, c = split_columns(x, widths)

Different operations compute the gradients of a, b and c, and autograd would concatenate them: it reads and
writes each element once more. Instead an operation asks in its forward pass for the place of its operand's
gradient (`place_of`), and writes it there in its backward pass. Gradients that are elsewhere are copied.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._copies import copy_in_words
from liger_models.kernels._dispatch import once_differentiable


def split_columns(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """x [T, C] -> views [T, width] for each of the widths, which add up to C, like `torch.split`."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.requires_grad:
        return x.split(list(widths), dim=1)
    gradient = _Gradient(x, widths)
    parts: tuple[Tensor, ...] = _Split.apply(x, gradient)
    for number, part in enumerate(parts):
        _note(part, Place(gradient, number))
    return parts


class Place:
    """Columns of the gradient of a split matrix."""

    def __init__(self, gradient: _Gradient, number: int):
        self._gradient, self._number = gradient, number

    def take(self) -> Tensor:
        """Memory [T, width], uninitialised, for the gradient of a part in one backward pass."""
        return self._gradient.take(self._number)


# By the id of the part, while it lives.
_PLACES: dict[int, tuple[weakref.ref[Tensor], Place]] = {}


def _note(part: Tensor, place: Place) -> None:
    forget = functools.partial(_PLACES.pop, id(part))
    _PLACES[id(part)] = weakref.ref(part, lambda _: forget(None)), place


def place_of(x: Tensor) -> Place | None:
    """In a forward pass: where the backward pass may write the gradient of x; None if x is no part of a split
    matrix. The gradient must have the dtype and the shape of x, and nothing else may be written there.
    """
    part, place = _PLACES.get(id(x), (None, None))
    return place if part is not None and part() is x else None


def room_for(x: Tensor, place: Place | None) -> Tensor:
    """In a backward pass: uninitialised memory for the gradient of x, at its place or contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if place is None else place.take()


class _Gradient:
    """The gradient [T, C] of a split matrix: memory that exists from the first part's gradient on.

    Each part's memory is given out once. A gradient may live on after a backward pass that does not reach the
    matrix, so another pass gets other memory.
    """

    def __init__(self, x: Tensor, widths: Sequence[int]):
        self.widths = list(widths)
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self._memory: Tensor | None = None
        self._taken: set[int] = set()

    def take(self, number: int) -> Tensor:
        if self._memory is None or number in self._taken:
            self._memory, self._taken = self._empty(), set()
        self._taken.add(number)
        return self._memory.split(self.widths, 1)[number]

    def join(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradient, of the parts' gradients, which are copied unless they are at their places."""
        whole, taken = self._memory, self._taken
        self._memory, self._taken = None, set()
        if whole is not None:
            places = whole.split(self.widths, 1)
            there = {i for i, found in enumerate(gradients) if found is not None and _is(found, places[i])}
        if whole is None or there != taken:  # memory that was given out for another gradient stays as it is
            whole, there = self._empty(), set()
        for i, target in enumerate(whole.split(self.widths, 1)):
            found = gradients[i]
            if found is None:
                target.zero_()
            elif i not in there:
                copy_in_words(found, target)
        return whole

    def _empty(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


def _is(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: _Gradient) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return x.split(gradient.widths, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if all(gradient is None for gradient in gradients):
            return None, None
        return ctx.gradient.join(gradients), None
