"""Writing of the same native tensors again and again, as streams of weights do after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr, Ref, places_by_ref

Form = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and storage offset of a view."""


class Piece(NamedTuple):
    """Elements of a checkpoint tensor: a view of the native tensor of this number in its group."""

    number: int
    form: Form


class Writer:
    """`expressions.write`, which looks for the places of elements once, while shapes and strides stay.

    Args:
        group: expressions by native name, which cover whole checkpoint tensors.
    """

    def __init__(self, group: Mapping[str, Expr]):
        self.group = group
        self._forms: list[Form] = []
        self._pieces: list[tuple[Ref, list[Piece]]] = []

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The checkpoint tensors, by name, of native tensors in the group's order: views where possible."""
        forms = [_form(tensor) for tensor in tensors]
        if forms != self._forms:
            self._pieces, self._forms = self._find(tensors), forms
        written = {}
        for ref, pieces in self._pieces:
            if len(pieces) == 1:
                ((number, form),) = pieces
                one = tensors[number] if form == forms[number] else tensors[number].as_strided(*form)
            else:
                one = torch.cat([tensors[number].as_strided(*form).reshape(-1) for number, form in pieces])
            written[ref.name] = one if one.shape == ref.shape else one.reshape(ref.shape)
        return written

    def _find(self, tensors: Sequence[Tensor]) -> list[tuple[Ref, list[Piece]]]:
        """The pieces of each checkpoint tensor, in the order of its elements."""
        natives = list(zip(self.group.values(), tensors, strict=True))
        found: dict[Ref, list[tuple[int, Piece]]] = {ref: [] for ref in places_by_ref(natives)}
        for number, (expr, tensor) in enumerate(natives):
            for place in expr.places(tensor):
                found[place.ref].append((place.start, Piece(number, _form(place.view))))
        return [(ref, [piece for _, piece in sorted(pieces)]) for ref, pieces in found.items()]


def _form(tensor: Tensor) -> Form:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
