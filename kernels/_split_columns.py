"""Columns of a matrix, whose gradients are written next to each other.

    a, b, c = split_columns(x, widths)

Different operations compute the gradients of a, b and c, and autograd would concatenate them: it reads and
writes each element once more. Here the gradient of x is allocated first. An operation asks in its forward
pass for the place of its operand's gradient (`place_of`), and writes it there in its backward pass
(`room_for`). Gradients that are elsewhere are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._copies import copy_in_words
from liger_models.kernels._dispatch import once_differentiable

Place = Callable[[], Tensor]
"""Returns memory [T, width], uninitialised, for the gradient of a part in one backward pass."""


def split_columns(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """x [T, C] -> views [T, width] for each of the widths, which add up to C, like `torch.split`."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.requires_grad:
        return x.split(list(widths), dim=1)
    gradient = _Gradient(x, widths)
    parts: tuple[Tensor, ...] = _Split.apply(x, gradient)
    for number, part in enumerate(parts):
        part.gradient_place = functools.partial(gradient.take, number)  # type: ignore[attr-defined]
    return parts


def place_of(x: Tensor) -> Place | None:
    """In a forward pass: where the backward pass may write the gradient of x; None if x is no part of a split
    matrix. The gradient must have the dtype and the shape of x, and nothing else may be written there.
    """
    return getattr(x, "gradient_place", None)


def room_for(x: Tensor, place: Place | None) -> Tensor:
    """In a backward pass: uninitialised memory for the gradient of x, at its place or contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if place is None else place()


class _Gradient:
    """The gradient [T, C] of a split matrix: memory that exists from the first part's gradient on.

    Each part's memory is given out once. A gradient may live on after a backward pass that does not reach the
    matrix, so another pass gets other memory.
    """

    def __init__(self, x: Tensor, widths: Sequence[int]):
        self.widths = list(widths)
        self._allocate = functools.partial(torch.empty, x.shape, dtype=x.dtype, device=x.device)
        self._whole: Tensor | None = None
        self._taken: dict[int, Tensor] = {}

    def take(self, number: int) -> Tensor:
        if self._whole is None or number in self._taken:
            self._whole, self._taken = self._allocate(), {}
        self._taken[number] = self._whole.split(self.widths, 1)[number]
        return self._taken[number]

    def join(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradient, of the parts' gradients, which are copied unless they are at their places."""
        whole, there = self._whole, self._taken
        self._whole, self._taken = None, {}
        if whole is None or any(gradients[number] is not place for number, place in there.items()):
            whole, there = self._allocate(), {}  # memory that holds another gradient stays as it is
        for number, target in enumerate(whole.split(self.widths, 1)):
            found = gradients[number]
            if found is None:
                target.zero_()
            elif number not in there:
                copy_in_words(found, target)
        return whole


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
