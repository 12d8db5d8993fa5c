"""Weight maps: native tensor names mapped to expressions over checkpoint tensors (expressions.py)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch

from liger_models.convert.checkpoints.expressions import (
    Cat,
    Expr,
    Permute,
    Ref,
    Rows,
    Shape,
    Stack,
    places_by_ref,
)


def permuted(name: str, shape: Shape, pattern: str, **sizes: int) -> Permute:
    """Build the native tensor of `shape` that holds checkpoint tensor `name` in another order.

        permuted("gate_up_proj", (8, 192, 64), "e h (i 2) -> e (2 i) h")  # [8, 64, 192] in the checkpoint

    Both sides name the same axes, the checkpoint's on the left and the native ones on the right. Parentheses
    join neighbours to one dimension. A number is an axis of that size; `sizes` gives sizes that the shape
    leaves open.

    Raises:
        ValueError: the pattern is invalid or does not fit the shape.
    """
    sides = [re.findall(r"\(([^()]*)\)|(\w+)", side) for side in pattern.split("->")]
    disk, native = (_numbered((group or axis).split() for group, axis in side) for side in (sides * 2)[:2])
    axes, order = ([axis for group in side for axis in group] for side in (disk, native))
    if len(sides) != 2 or sorted(axes) != sorted(order) or len(set(axes)) != len(axes):
        raise ValueError(f"{pattern!r} does not name the same axes, each once, on both sides of one arrow")
    if len(native) != len(shape):
        raise ValueError(f"{pattern!r} gives {len(native)} dimensions, {name!r} has the native shape {shape}")
    sizes |= {axis: int(axis) for axis in axes if axis.isdigit()}
    for group, size in zip(native, shape, strict=True):
        known = math.prod(sizes.get(axis, 1) for axis in group)
        unknown = [axis for axis in group if axis not in sizes]
        if len(unknown) > 1 or size % known or (not unknown and size != known):
            raise ValueError(f"{pattern!r} does not divide the native shape {shape} of {name!r}: {group}")
        sizes |= dict.fromkeys(unknown, size // known)
    part = Ref(name, tuple(math.prod(sizes[axis] for axis in group) for group in disk))
    return Permute(part, tuple(sizes[axis] for axis in axes), tuple(map(axes.index, order)), shape)


def _numbered(side: Iterable[list[str]]) -> list[list[str]]:
    """Tell the axes of size 1 apart: 1, 01, 001 and so on."""
    seen = itertools.count()
    return [["0" * next(seen) + axis if axis == "1" else axis for axis in group] for group in side]


def piece_of_groups(name: str, widths: Sequence[int], piece: int, groups: int, rest: Shape = ()) -> Expr:
    """Extract one of several native tensors that checkpoint tensor `name` interleaves by group.

        piece_of_groups("query_key_value.weight", (64, 64, 64), 1, groups=12, rest=(768,))  # the keys

    The checkpoint tensor has the shape [groups * sum(widths), *rest]: each group has `widths[0]` rows of the
    first native tensor, then `widths[1]` of the second, and so on. The native tensor, [groups *
    widths[piece], *rest], has only the rows of its piece, with the groups in the same order.
    """
    width, start = sum(widths), sum(widths[:piece])
    shape = (groups, width, *rest)
    dims = tuple(range(len(shape)))
    opened = Permute(Ref(name, (groups * width, *rest)), shape, dims, shape)
    cut = Rows(opened, start, start + widths[piece], dim=1)
    return Permute(cut, cut.shape, dims, (groups * widths[piece], *rest))


def permuted_piece(permuted: Permute, number: int, count: int) -> Expr:
    """The native tensor of a `Permute` of a checkpoint tensor, if that is one of `count` equal pieces, one
    after another, of the tensor of that name.
    """
    name, (rows, *rest) = next(permuted.refs()).name, permuted.part.shape
    shape = (count, *permuted.view)
    opened = Permute(Ref(name, (count * rows, *rest)), shape, tuple(range(len(shape))), shape)
    cut = Rows(opened, number, number + 1)
    return Permute(cut, cut.shape, (0, *(dim + 1 for dim in permuted.order)), permuted.shape)


WeightMap = Mapping[str, Expr]


def with_transposed(expr: Expr, names: Set[str]) -> Expr:
    """The same native tensor, over checkpoint tensors; the tensors in `names` are stored with their last
    two dimensions swapped.
    """
    if not any(ref.name in names for ref in expr.refs()):
        return expr
    if isinstance(expr, Cat | Stack):
        return replace(expr, parts=tuple(with_transposed(part, names) for part in expr.parts))
    if isinstance(expr, Ref):
        expr = Permute(expr, expr.shape, tuple(range(len(expr.shape))), expr.shape)
    assert isinstance(expr, Permute | Rows)
    if isinstance(expr, Rows) or not isinstance(expr.part, Ref):
        return replace(expr, part=with_transposed(expr.part, names))
    *before, rows, columns = expr.part.shape
    # The dimensions of the view that divide the columns, and those that divide the rows.
    at = len(expr.view) - _dividing(expr.view, columns)
    above = at - _dividing(expr.view[:at], rows)
    old = [*range(above), *range(at, len(expr.view)), *range(above, at)]
    view = tuple(expr.view[dim] for dim in old)
    order = tuple(old.index(dim) for dim in expr.order)
    return Permute(Ref(expr.part.name, (*before, columns, rows)), view, order, expr.shape)


def _dividing(view: Shape, size: int) -> int:
    """The number of last dimensions of a view that one of `size` is divided into."""
    return next(n for n in range(1, len(view) + 1) if math.prod(view[-n:]) == size)


def connected(weight_map: WeightMap) -> list[dict[str, Expr]]:
    """Split a weight map into the smallest sets that share no checkpoint tensor, in the map's order. Parts of
    a tensor that a checkpoint stores whole form one set; most others are sets of one.
    """
    home: dict[str, int] = {}  # checkpoint tensor -> its set
    sets: dict[int, dict[str, Expr]] = {}
    for number, (native, expr) in enumerate(weight_map.items()):
        names = {ref.name for ref in expr.refs()}
        joined: dict[str, Expr] = {}
        for other in sorted({home[name] for name in names if name in home}):
            joined |= sets.pop(other)
        sets[number] = joined | {native: expr}
        home |= dict.fromkeys((ref.name for part in sets[number].values() for ref in part.refs()), number)
    return list(sets.values())


def checkpoint_shapes(weight_map: WeightMap) -> dict[str, Shape]:
    """Return the shapes of a weight map's checkpoint tensors, by name, in order.

    Raises:
        ValueError: the map uses one tensor twice, so that a write would lose one of the uses.
    """
    shapes: dict[str, Shape] = {}
    owners: dict[str, list[str]] = {}
    for native, expr in weight_map.items():
        for ref in expr.refs():
            shapes[ref.name] = ref.shape
            owners.setdefault(ref.name, []).append(native)
    for name, natives in owners.items():
        if len(natives) > 1 and not _is_disjoint(name, [weight_map[native] for native in set(natives)]):
            raise ValueError(
                f"checkpoint tensor {name!r} is used twice: by {natives[0]!r} and {natives[1]!r}"
            )
    return shapes


def check_whole(weight_map: WeightMap) -> None:
    """Raise ValueError unless each checkpoint element occurs exactly once, as writing requires."""
    places_by_ref((expr, torch.empty(expr.shape, device="meta")) for expr in weight_map.values())


def _is_disjoint(name: str, exprs: Sequence[Expr]) -> bool:
    """Return whether no element of a checkpoint tensor is used twice."""
    places = [place for expr in exprs for place in expr.places(torch.empty(expr.shape, device="meta"))]
    ranges = sorted((place.start, place.stop) for place in places if place.ref.name == name)
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
