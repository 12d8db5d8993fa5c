"""How far rounding alone moves a result: the same computation with the terms of its sums in another order.

    with OtherOrder(seed):
        again = run()                     # forward and backward

CPUs differ in the order in which they add the terms of a product of matrices (the width of their vectors, the
blocks that fit their caches). Two correct implementations are about as far apart as one is from itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# The operands whose sum runs over (the last dimension of the first, the last but one of the second).
PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}


class OtherOrder(TorchDispatchMode):
    """Shuffle the terms of matrix products, convolutions, sums and means; equal seeds shuffle alike."""

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
        return function(*args, **(kwargs or {}))

    def _order(self, length: int, like: Tensor) -> Tensor:
        return torch.randperm(length, generator=self.generator).to(like.device)
