"""Writing of the same native tensors again and again, as streams of weights do after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr, Ref, places_by_ref


class Writer:
    """`expressions.write`, which looks for the places of elements once, while shapes and strides stay.

    Args:
        group: expressions by native name, which cover whole checkpoint tensors.
    """

    def __init__(self, group: Mapping[str, Expr]):
        self.group = group
        self._forms: list[tuple[Any, ...]] = []
        self._pieces: list[tuple[Ref, list[tuple[Any, ...]]]] = []

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The checkpoint tensors, by name, of native tensors in the group's order: views where possible."""
        forms = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
        if forms != self._forms:
            self._pieces, self._forms = self._find(tensors), forms
        written = {}
        for ref, pieces in self._pieces:
            views = [tensors[number].as_strided(*view) for number, *view in pieces]
            one = views[0] if len(views) == 1 else torch.cat([view.reshape(-1) for view in views])
            written[ref.name] = one.reshape(ref.shape)
        return written

    def _find(self, tensors: Sequence[Tensor]) -> list[tuple[Ref, list[tuple[Any, ...]]]]:
        """For each checkpoint tensor, the number, size, strides and offset of its pieces in native ones."""
        natives = list(zip(self.group.values(), tensors, strict=True))
        found: dict[Ref, list[tuple[Any, ...]]] = {ref: [] for ref in places_by_ref(natives)}
        for number, (expr, tensor) in enumerate(natives):
            for place in expr.places(tensor):
                view = place.view
                found[place.ref].append(
                    (place.start, number, view.shape, view.stride(), view.storage_offset())
                )
        return [
            (ref, [piece[1:] for piece in sorted(pieces, key=lambda piece: piece[0])])
            for ref, pieces in found.items()
        ]
