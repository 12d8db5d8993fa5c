"""Launches of an optimizer step, used again while parameters, gradients and state stay where they are.

Checking and listing the operands of a step costs the host some microseconds a parameter, in which the GPU
waits: a step's host synchronises right before the update. Comparing addresses costs a tenth of that, and so
does renewing the addresses of gradients, which move from step to step unless a CUDA graph writes them. What
runs for each parameter here runs in C: `map` over methods, and no function of Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import use_triton
from liger_models.kernels.optimizer.sum_of_squares import SumOfSquares

Addresses = list[Any]


class Update(NamedTuple):
    """The update of a group's parameters on one device.

    Attributes:
        device: of the parameters.
        steps: their counters of steps.
        run: takes the step, with the arguments of `kernels.adamw` after the tensors; `AdamWLaunches` if it
            can be used again.
    """

    device: torch.device
    steps: list[Tensor]
    run: Any


class Operands(NamedTuple):
    """The operands of a group's update, or the tensors of a norm.

    Attributes:
        fixed: a key of all but the gradients' addresses.
        gradients: these.
    """

    fixed: Addresses
    gradients: list[int]


class Prepared:
    """The launches of an optimizer's latest step."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[Operands, list[Update]]] = {}  # by a group's first parameter's number
        self._norm: tuple[Operands, SumOfSquares] | None = None

    def updates(
        self, number: int, operands: Operands | None, make: Callable[[], tuple[list[Update], bool]]
    ) -> list[Update]:
        """The updates of a group, by `make` if its operands have moved. `make` also returns whether they can
        be used again.
        """
        kept = self._groups.get(number)
        if kept is not None and operands is not None and kept[0].fixed == operands.fixed:
            if kept[0].gradients == operands.gradients:
                return kept[1]
            if len(kept[1]) == 1 and kept[1][0].run.moved(operands.gradients):  # on one device
                self._groups[number] = operands, kept[1]
                return kept[1]
        made, lasting = make()
        self._groups.pop(number, None)
        if lasting and operands is not None:
            self._groups[number] = operands, made
        return made

    def sum_of_squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """`kernels.sum_of_squares` of gradients on one device, for which it runs kernels."""
        kinds = (map(read, gradients) for read in (Tensor.numel, _dtype, Tensor.is_contiguous))
        operands = Operands([*chain.from_iterable(kinds)], [*map(Tensor.data_ptr, gradients)])
        if self._norm is not None and self._norm[0].fixed == operands.fixed:
            before, launches = self._norm
            if before.gradients == operands.gradients or launches.moved(operands.gradients):
                self._norm = operands, launches
                return launches()
        launches = SumOfSquares(gradients)
        self._norm = None if launches.copied else (operands, launches)
        return launches()


def operands_of(
    group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]], numbers: list[int]
) -> Operands | None:
    """The operands of a group's update. None if some are not plain tensors of kernels, or have no state yet,
    or gradients have another memory layout than their parameters.
    """
    parameters = [p for p in group["params"] if p.grad is not None]
    gradients = plain_gradients(parameters)
    own = [*map(state.get, parameters)]
    if gradients is None or not all(own) or (parameters and not use_triton(parameters[0])):
        return None
    tensors = chain(parameters, *map(operator.methodcaller("values"), own))
    which = [p.grad is None for p in group["params"]]
    kinds = [numbers, group["weights"], group["seed"], which, [*map(_dtype, gradients)]]
    return Operands([*kinds, *map(Tensor.data_ptr, tensors)], [*map(Tensor.data_ptr, gradients)])


def plain_gradients(parameters: Sequence[Tensor]) -> list[Any] | None:
    """The gradients of parameters that all have one. None if some of the tensors are of a class of their own,
    or sparse, or a gradient has another memory layout than its parameter.
    """
    gradients: list[Any] = [p.grad for p in parameters]
    if not {*map(type, parameters), *map(type, gradients)} <= _PLAIN or any(map(_is_sparse, gradients)):
        return None
    strides = (map(Tensor.stride, tensors) for tensors in (parameters, gradients))
    return gradients if all(map(operator.eq, *strides)) else None


_PLAIN = {Tensor, torch.nn.Parameter}
_dtype, _is_sparse = operator.attrgetter("dtype"), operator.attrgetter("is_sparse")
