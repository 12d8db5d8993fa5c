"""The tokens of text and of pictures in a batch, for layers that compute them with different weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.sequences.part import Part


@dataclass(frozen=True, eq=False)
class Modality(Part):
    """The tokens of a batch with pictures.

    Attributes:
        order: the tokens of text, then those of pictures, each in their order, [T] int64.
        back: the place of each token in `order`, [T] int64.
        text: the number of text tokens.
    """

    order: Tensor
    back: Tensor
    text: int

    @classmethod
    def of(cls, pictured: Tensor) -> Modality | None:
        """Divide tokens, pictured [T] bool; None: no token is a picture's. Synchronises the device."""
        pictures = int(pictured.sum())
        if not pictures:
            return None
        order = pictured.int().argsort(stable=True)
        return cls(order, order.argsort(), len(order) - pictures)

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of text and those of pictures, of x [T, ...]."""
        x = _Reordered.apply(x, self.order, self.back)
        return x[: self.text], x[self.text :]

    def joined(self, text: Tensor, pictures: Tensor) -> Tensor:
        """The inverse of `apart`: [T, ...]."""
        made: Tensor = _Reordered.apply(torch.cat([text, pictures]), self.back, self.order)
        return made


class _Reordered(torch.autograd.Function):
    """Rows in another order. Autograd would add up the gradients of rows that might occur twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
