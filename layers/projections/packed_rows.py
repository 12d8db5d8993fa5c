"""Rows of packed projections: which of them a checkpoint holds together, and which have a bias."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.convert.checkpoints.rows import is_in_order, rows_in_checkpoint, rows_of


def layers_in_checkpoint(packed_parts: Mapping[str, int], weight: Expr) -> dict[str, Tensor]:
    """Map the layers in which a checkpoint holds a packed projection, by name, to their rows of the packed
    one, in the checkpoint's order.

    Parts that share no checkpoint tensor are separate layers. Parts that the checkpoint holds together are
    one layer, named as in the checkpoint.

    Args:
        packed_parts: the widths of the projections, by name.
        weight: the expression of its weight.
    """
    held: list[tuple[list[str], set[str]]] = []  # parts, and the checkpoint tensors that hold them
    start, bounds = 0, {}
    for part, height in packed_parts.items():
        bounds[part] = start, start + height
        parts, names = [part], {ref.name for ref in rows_of(weight, *bounds[part]).refs()}
        for other in [other for other in held if other[1] & names]:
            held.remove(other)
            parts, names = [*other[0], *parts], other[1] | names
        held.append((parts, names))
        start += height
    found = {}
    for parts, names in held:
        if len(parts) == 1:
            found[parts[0]] = torch.arange(*bounds[parts[0]], device="cpu")
            continue
        (name,) = names
        try:
            rows = rows_in_checkpoint(weight)[name]
        except ValueError:  # the checkpoint has the whole in another form, such as transposed
            rows = torch.arange(start, device="cpu")
        if not name.endswith(".weight"):  # not of a layer, whose rows tools could know in its order
            rows = torch.arange(start, device="cpu")
        found[name.split(".")[-2]] = rows
    return found


def rows_in(packed: Expr, rows: Tensor) -> Expr:
    """The expression of some rows of a packed tensor: a single checkpoint tensor if possible."""
    if is_in_order(rows):
        return rows_of(packed, int(rows[0]), int(rows[-1]) + 1)
    held = rows_in_checkpoint(packed)
    for ref in packed.refs():
        if torch.equal(held[ref.name], rows):
            return Ref(ref.name, ref.shape)
    ends = [*(rows.diff() != 1).nonzero().flatten().add(1).tolist(), len(rows)]
    runs = zip([0, *ends[:-1]], ends, strict=True)
    return Cat(tuple(rows_of(packed, int(rows[a]), int(rows[b - 1]) + 1) for a, b in runs))


def rows_of_bias(parts: Mapping[str, int], unbiased: tuple[str, ...], rows: Tensor) -> Tensor | None:
    """Rows of a packed bias without `unbiased` parts, for rows of the weight; None where they have none.

    Raises:
        ValueError: a layer holds parts with a bias and without.
    """
    if not unbiased:
        return rows
    has = torch.tensor([name not in unbiased for name, n in parts.items() for _ in range(n)], device="cpu")
    own = has[rows]
    if bool(own.any()) and not bool(own.all()):
        raise ValueError(f"the checkpoint joins {', '.join(parts)}, of which {unbiased} have no bias")
    return (has.cumsum(0) - 1)[rows] if bool(own.all()) else None
