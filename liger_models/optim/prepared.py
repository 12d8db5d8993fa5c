"""Launches of an optimizer step, used again while parameters, gradients and state stay where they are.

Checking and listing the operands of a step costs the host some microseconds a parameter, in which the GPU
waits: a step's host synchronises right before the update. Comparing addresses costs a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import use_triton
from liger_models.kernels.optimizer.adamw import AdamWSettings
from liger_models.kernels.optimizer.sum_of_squares import SumOfSquares

Addresses = list[Any]
_PLAIN = (Tensor, torch.nn.Parameter)


class Update(NamedTuple):
    """The update of a group's parameters on one device.

    Attributes:
        device: of the parameters.
        steps: their counters of steps.
        run: takes the step, with the arguments of `kernels.adamw` after the tensors.
    """

    device: torch.device
    steps: list[Tensor]
    run: Callable[[AdamWSettings, Tensor | None, Tensor | None], None]


class Prepared:
    """The launches of an optimizer's latest step."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[Addresses, list[Update]]] = {}  # by a group's first parameter's number
        self._norm: tuple[Addresses, SumOfSquares] | None = None

    def updates(
        self, number: int, addresses: Addresses | None, make: Callable[[], tuple[list[Update], bool]]
    ) -> list[Update]:
        """The updates of a group, by `make` if its operands have moved. `make` also returns whether they can
        be used again.
        """
        kept = self._groups.get(number)
        if kept is not None and addresses is not None and kept[0] == addresses:
            return kept[1]
        made, lasting = make()
        self._groups.pop(number, None)
        if lasting and addresses is not None:
            self._groups[number] = addresses, made
        return made

    def sum_of_squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """`kernels.sum_of_squares` of gradients on one device, for which it runs kernels."""
        addresses: Addresses = [(g.data_ptr(), g.numel(), g.dtype) for g in gradients]
        if self._norm is None or self._norm[0] != addresses:
            launches = SumOfSquares(gradients)
            if launches.copied:
                return launches()
            self._norm = addresses, launches
        return self._norm[1]()


def addresses_of(
    group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]], numbers: list[int]
) -> Addresses | None:
    """Key of the operands of a group's update: the addresses and kinds of its tensors. None if some
    are not plain tensors of kernels, or have no state yet.
    """
    found: Addresses = [numbers, group["weights"], group["seed"]]
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            found.append(None)
            continue
        own = state.get(parameter)
        if not own or type(parameter) not in _PLAIN or type(gradient) not in _PLAIN or gradient.is_sparse:
            return None
        if len(found) == 3 and not use_triton(parameter):
            return None
        found += parameter.data_ptr(), gradient.data_ptr(), gradient.dtype, gradient.stride()
        found += (tensor.data_ptr() for tensor in own.values())
    return found
