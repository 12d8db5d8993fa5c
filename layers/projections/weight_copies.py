"""Float8 copies of weights, kept from one micro-batch of a step to the next.

A weight is quantised for each product, by rows for y and by columns for dx. It does not change between the
micro-batches of a step, so the copies of the first can serve all, for one byte an element and copy: the same
bits, without reading the weight again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels.float8.quantize import Float8


class WeightCopies:
    """The copies of weights with one recipe; none outside of `kept`."""

    def __init__(self) -> None:
        self._weights: dict[int, Tensor] = {}  # by address: the backward pass may see them detached
        self._copies: dict[Any, tuple[tuple[int, ...], Float8]] = {}  # with the weights' versions

    def __deepcopy__(self, _: Any) -> WeightCopies:
        return WeightCopies()

    def __reduce__(self) -> Any:
        return WeightCopies, ()

    @contextmanager
    def kept(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Keep the copies of these weights, each from its first product until the end of the context."""
        outer = self._weights, self._copies
        self._weights, self._copies = {weight.data_ptr(): weight for weight in weights}, {}
        try:
            yield
        finally:
            self._weights, self._copies = outer

    def get(self, name: str, of: Sequence[Tensor], make: Callable[[], Float8]) -> Float8:
        """The copy `name` of these weights, from `make` if it is not kept, or one of them was modified."""
        if not self._weights or torch.compiler.is_compiling():
            return make()
        if of[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return make()  # each replay of a recorded step quantises its weights
        places = [weight.data_ptr() for weight in of]
        weights = [self._weights.get(place) for place in places]
        versions = []
        for seen, place, weight in zip(of, places, weights, strict=True):
            if weight is None or weight.data_ptr() != place or weight.shape != seen.shape:
                return make()
            versions.append(weight._version)
        found = self._copies.get((name, *places))
        if found is None or found[0] != tuple(versions):
            found = self._copies[name, *places] = tuple(versions), make()
        return found[1]
