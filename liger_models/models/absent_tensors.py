"""Tensors that a checkpoint did not have, because they were zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.convert.checkpoints.expressions import Zeros
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes


def write_all_tensors(model: Any) -> None:
    """Give a model that is to be written the layout with all of its tensors, if those that its checkpoint did
    not have are no longer zeros.
    """
    if not model.layout.absent:
        return
    tensors, own = model.saved_tensors(), model.weight_map()
    absent = [tensors[name] for name, expr in own.items() if isinstance(expr, Zeros)]
    if not any(bool(tensor.any()) for tensor in absent if not tensor.is_meta):
        return
    model.layout = replace(model.layout, absent=())
    if model.source is not None:
        added = checkpoint_shapes(model.weight_map()).keys() - checkpoint_shapes(own).keys()
        model.source = replace(model.source, layout=model.layout, added=frozenset(added))
