"""Rows of native tensors: as expressions, and as the rows of the checkpoint tensors that hold them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref, Rows, Shape, places_by_ref

MOST_PIECES = 16  # of a row, that are read one by one


def rows_of(expr: Expr, start: int, stop: int) -> Expr:
    """The rows [start, stop) of an expression, as `Rows` of as few of its parts as hold them."""
    if (start, stop) == (0, row_count(expr.shape)):
        return expr
    if not isinstance(expr, Cat) or expr.dim > 0:
        return Rows(expr, start, stop)
    cut, offset = [], 0
    for part in expr.parts:
        rows = part.shape[0]
        low, high = max(start - offset, 0), min(stop - offset, rows)
        if low < high:
            cut.append(rows_of(part, low, high))
        offset += rows
    return cut[0] if len(cut) == 1 else Cat(tuple(cut))


def rows_in_checkpoint(expr: Expr) -> dict[str, Tensor]:
    """For each checkpoint tensor of a native one, the numbers of the native rows that are its rows, in its
    order.

    Raises:
        ValueError: a checkpoint tensor is divided otherwise than by rows.
    """
    rest = len(expr.shape) - 1
    numbers = torch.arange(expr.shape[0], device="cpu").view(-1, *[1] * rest).expand(expr.shape)
    found = {}
    for ref, places in places_by_ref([(expr, numbers)]).items():
        rows = []
        for *_, view in places:
            inner = range(view.dim() - rest, view.dim())
            whole = view.dim() >= rest and view.shape[view.dim() - rest :] == expr.shape[1:]
            if not whole or any(view.stride(dim) and view.shape[dim] > 1 for dim in inner):
                raise ValueError(f"{ref.name!r} does not consist of rows of the native tensor")
            for _ in range(rest):
                view = view.select(-1, 0)
            rows.append(view.reshape(-1))
        found[ref.name] = torch.cat(rows)
    return found


def slabs(expr: Expr) -> list[tuple[Expr, int, slice]]:
    """Rows of dimension 0 that are better read whole, as a shard by another dimension lies in many pieces
    in the file: expressions of one whole row each, the shard's dimension, and its places there. Empty if the
    shard is few pieces.

    gpt-oss-20b's experts, divided by two ranks along their outputs, lie in 133 million pieces a layer.
    """
    if not isinstance(expr, Rows) or expr.dim == 0:
        return []
    places = expr.places(torch.empty(expr.shape, device="meta"))
    if next(itertools.islice(places, MOST_PIECES * row_count(expr.shape), None), None) is None:
        return []
    along = slice(expr.start, expr.stop)
    return [(Rows(expr.part, row, row + 1), expr.dim, along) for row in range(expr.shape[0])]


def is_in_order(rows: Tensor) -> bool:
    """Whether row numbers count up one by one."""
    return torch.equal(rows, torch.arange(len(rows), device="cpu") + rows[0])


def is_one_tensor(expr: Expr) -> bool:
    """Whether a checkpoint holds all of a native tensor in one, transposed perhaps, but not with its rows in
    another order.
    """
    if isinstance(expr, Ref):
        return True
    if len(set(expr.refs())) > 1:
        return False
    try:
        (rows,) = rows_in_checkpoint(expr).values()
    except ValueError:
        return True
    return is_in_order(rows)


def row_count(shape: Shape) -> int:
    """The number of rows along dimension 0; a tensor without dimensions is one row."""
    return shape[0] if shape else 1
