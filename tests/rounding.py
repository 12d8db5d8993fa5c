"""Effect of rounding on a result, measured by repeating the computation with sums in another order.

    with OtherOrder(seed):
        again = run()                     # forward and backward

CPUs add the terms of a matrix product in different orders, depending on vector width, cache blocking and
operand alignment. Two correct implementations differ about as much as one from its own reordering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# float32 rounds to 6e-8 of a value. From a parameter to its gradient a value passes about a hundred roundings
# that matter in a tiny model (three layers forward and back), and they add up like a random walk, 1e-6 at
# most where nothing cancels. A gradient is a sum over tokens in which much cancels: a factor of ten for that.
# Faults stand out far above (tests/architectures/test_mutations.py).
BOUND = 1e-5
# Where more cancels than that, the bound is derived from the reference: two correct implementations are about
# as far apart as one is from itself when its sums run in another order. (In every family's tiny config the
# first distance is at most 1.3 times the largest of four of the second.) A factor of four is for the rest.
# Where much cancels, the second varies fivefold from order to order, so that four are too few to know it: in
# LFM2-VL's encoder on an Intel Xeon all four were small.
ORDERS, FACTOR = 16, 4.0
LARGEST_ROUNDING = 1e-4  # of a truth to which anything is compared: a fault is of the order of percents


def relative_distance(found: Tensor, expected: Tensor, least_size: float = 0.0) -> float:
    """Return |found - expected| / max(|expected|, least_size) in float64; infinite for NaN."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    distance, size = (found - expected).norm().item(), max(expected.norm().item(), least_size)
    if math.isnan(distance) or not math.isfinite(size):
        return math.inf
    return distance / size if size else distance


def beyond_rounding(
    distances: Mapping[str, float], again: Callable[[int], Mapping[str, float]], bound: float = BOUND
) -> dict[str, float]:
    """Return the distances from a truth that rounding does not explain; only those that no rounding explains,
    if there are any.

    Args:
        again: returns the distances of the truth from itself with sums in another order, given a seed. Called
            only if the bound is missed, and until rounding explains all distances.
    """
    missed = {name: distance for name, distance in distances.items() if not distance <= bound}
    most = max(bound, FACTOR * LARGEST_ROUNDING)
    if faults := {name: distance for name, distance in missed.items() if not distance <= most}:
        return faults
    rounding = dict.fromkeys(missed, 0.0)
    for seed in range(ORDERS):
        if not missed:
            break
        other = again(seed)
        for name, distance in list(missed.items()):
            rounding[name] = max(rounding[name], other[name])
            if distance <= FACTOR * rounding[name] <= FACTOR * LARGEST_ROUNDING:
                del missed[name]
    return missed


def beyond_bound(
    found: Mapping[str, Tensor], run: Callable[[], Mapping[str, Tensor]], bound: float = BOUND
) -> dict[str, float]:
    """Return the relative distances from the results of `run` that rounding does not explain, by name."""
    expected = dict(run())
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()

    def distances(results: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: relative_distance(results[name], truth) for name, truth in expected.items()}

    def again(seed: int) -> dict[str, float]:
        with OtherOrder(seed):
            return distances(run())

    return beyond_rounding(distances(found), again, bound)


aten = torch.ops.aten

# Operands contracted over (last dimension of the first, second-to-last of the second).
PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}


class OtherOrder(TorchDispatchMode):
    """Shuffle the terms of matrix products, convolutions, sums and means, and add up running sums in two
    pieces; equal seeds shuffle alike.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = list(args)
        if function in PRODUCTS:
            a, b = PRODUCTS[function]
            order = self._order(args[a].shape[-1], args[a])
            args[a], args[b] = args[a].index_select(-1, order), args[b].index_select(-2, order)
        elif function is aten.convolution.default and args[8] == 1:  # without groups
            order = self._order(args[0].shape[1], args[0])
            args[0], args[1] = args[0].index_select(1, order), args[1].index_select(1, order)
        elif function in SUMS and args[0].is_floating_point() and args[0].dim():
            dims = args[1] if len(args) > 1 and args[1] else range(args[0].dim())
            for dim in dims:
                args[0] = args[0].index_select(dim, self._order(args[0].shape[dim], args[0]))
        elif function is aten.cumsum.default and args[0].is_floating_point() and args[0].shape[args[1]] > 1:
            dim, length = args[1], args[0].shape[args[1]]
            first = 1 + int(torch.randint(length - 1, (), generator=self.generator))
            parts = args[0].split([first, length - first], dim)
            start, rest = (function(part, dim, *args[2:], **(kwargs or {})) for part in parts)
            return torch.cat([start, rest + start.narrow(dim, first - 1, 1)], dim)
        return function(*args, **(kwargs or {}))

    def _order(self, length: int, like: Tensor) -> Tensor:
        return torch.randperm(length, generator=self.generator).to(like.device)
