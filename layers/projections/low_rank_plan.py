"""A call of `low_rank_linear` without its tensors: the paths of each layer, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels import Float8
from liger_models.kernels._dispatch import autocasts
from liger_models.layers.projections.float8 import Float8Settings


class Adapter(NamedTuple):
    """A low-rank path, `scale * dropout(x) A^T B^T`.

    Attributes:
        a: [r, in], in any dtype.
        b: [out, r].
        scale: alpha / r, usually.
        dropout: the probability of dropping an element of x; 0 outside training.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


class Projection(NamedTuple):
    """A linear layer and its low-rank paths.

    Attributes:
        weight: [out, in] in the dtype of x, or the input of `dense`.
        bias: [out], or None.
        adapters: its low-rank paths. None: the plain layer.
        dense: returns the matrix [out, in] of a weight stored in another form (quantised), in forward and
            again in backward; the matrix is not kept. Such a weight is frozen. The function must not depend
            on autograd, and may return any dtype, which is cast to that of the product.
        dtype: the only dtype in which the layer multiplies. None: that of x.
        float8: how the products with the weight run in float8. None: they do not.
        rows: returns the weight in e4m3 with a scale for each row, if it is stored so.
    """

    weight: Tensor
    bias: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    dense: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    float8: Float8Settings | None = None
    rows: Callable[[Tensor], Float8] | None = None

    def takes(self, x: Tensor) -> bool:
        """Return True if the product for this input has the dtype that the layer requires."""
        return self.dtype in (None, product_dtype(x))


def product_dtype(x: Tensor) -> torch.dtype:
    if autocasts(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


@dataclass(frozen=True)
class Path:
    """A path: its layer, that layer's columns of y, its own columns of t, and its scale and dropout."""

    layer: int
    out: slice
    rank: slice
    scale: float
    dropout: float


@dataclass(frozen=True)
class Plan:
    """All paths, those without dropout first: they share the first `shared` columns of t, from one
    product.
    """

    dtype: torch.dtype
    outs: tuple[slice, ...]
    dense: tuple[Callable[[Tensor], Tensor] | None, ...]
    float8: tuple[Float8Settings | None, ...]
    rows: tuple[Callable[[Tensor], Float8] | None, ...]
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
        """Split a flat list into weights, biases (or None), A's and B's."""
        m, n = len(self.outs), len(self.paths)
        rest = list(tensors[2 * m :])
        return list(tensors[:m]), list(tensors[m : 2 * m]), rest[:n], rest[n:]
