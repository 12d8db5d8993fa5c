"""A call of `low_rank_linear` without its tensors: which paths belong to which layer, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Adapter(NamedTuple):
    """A low-rank path, `scale * dropout(x) A^T B^T`.

    Attributes:
        a: [r, in], in any dtype.
        b: [out, r].
        scale: alpha / r, as a rule.
        dropout: the probability with which an element of x is left out; 0 also outside training.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


class Projection(NamedTuple):
    """A linear layer and the paths beside it.

    Attributes:
        weight: [out, in] in the dtype of x; or what `dense` makes that of.
        bias: [out], or None.
        adapters: its low-rank paths. None: the plain layer.
        dense: makes the matrix [out, in] of a weight that is stored in another form (quantised), in forward
            and again in backward; nothing of it is kept. Such a weight is frozen. It must not depend on
            autograd, and gives a tensor of any dtype, which is cast to that of the product.
        dtype: in which alone the layer multiplies. None: in that of x.
    """

    weight: Tensor
    bias: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    dense: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None

    def takes(self, x: Tensor) -> bool:
        """Whether the product for this input is in the dtype that the layer asks for."""
        return self.dtype in (None, product_dtype(x))


def product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


@dataclass(frozen=True)
class Path:
    """A path: which layer it belongs to, that one's columns of y, its own columns of t, and its numbers."""

    layer: int
    out: slice
    rank: slice
    scale: float
    dropout: float


@dataclass(frozen=True)
class Plan:
    """Those without dropout come first: `shared` columns of t, of one product."""

    dtype: torch.dtype
    outs: tuple[slice, ...]
    dense: tuple[Callable[[Tensor], Tensor] | None, ...]
    autocast: bool
    paths: tuple[Path, ...]
    shared: int
    in_place: bool

    @property
    def width(self) -> int:
        return self.outs[-1].stop

    @property
    def rank(self) -> int:
        return self.paths[-1].rank.stop if self.paths else 0

    def parts(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any], list[Tensor], list[Tensor]]:
        """Weights, biases (or None), A's and B's."""
        m, n = len(self.outs), len(self.paths)
        rest = list(tensors[2 * m :])
        return list(tensors[:m]), list(tensors[m : 2 * m]), rest[:n], rest[n:]
