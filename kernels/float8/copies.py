"""Float8 copies of tensors, made by the operation that writes the tensor.

A norm or a gated product has a whole row in reach and can quantise it in the same pass. The linear layer that
reads the tensor then looks here before it quantises it (layers/projections/float8.py). A copy lives as long
as its tensor, and is not valid after a change in place.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels.float8.quantize import Float8


class _Copy(NamedTuple):
    of: weakref.ref[Tensor]
    version: int
    rows: Float8


# By the id of the tensor, while it lives. As an attribute of the tensor a copy would be pickled with it.
_COPIES: dict[int, _Copy] = {}


def carry_rows(x: Tensor, rows: Float8) -> Tensor:
    """Record the copy of x [R, C] by rows. Returns x."""
    forget = functools.partial(_COPIES.pop, id(x), None)
    _COPIES[id(x)] = _Copy(weakref.ref(x, lambda _: forget()), x._version, rows)
    return x


def carried_rows(x: Tensor) -> Float8 | None:
    """The copy of x by rows, if there is one and x has not been modified since."""
    if torch.compiler.is_compiling():
        return None
    copy = _COPIES.get(id(x))
    return copy.rows if copy is not None and copy.of() is x and copy.version == x._version else None


def forget_rows(x: Tensor) -> None:
    """Drop the copy of x, if there is one."""
    _COPIES.pop(id(x), None)
