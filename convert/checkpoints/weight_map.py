"""Weight maps: from the name of each native tensor to its expression over a checkpoint (expressions.py)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import torch

from liger_models.convert.checkpoints.expressions import Expr, Permute, Ref, Rows, Shape, places_by_ref


def permuted(name: str, shape: Shape, pattern: str, **sizes: int) -> Permute:
    """The native tensor of `shape` that holds checkpoint tensor `name` in another order.

        permuted("gate_up_proj", (8, 192, 64), "e h (i 2) -> e (2 i) h")  # [8, 64, 192] in the checkpoint

    Both sides of the arrow name the same axes; parentheses join neighbours to one dimension, the checkpoint's
    on the left, the native one on the right. An axis may be a number, which is then its size; where two sizes
    of one dimension are open, `sizes` gives them.

    Raises:
        ValueError: the pattern is none, or does not fit the shape.
    """
    sides = [re.findall(r"\(([^()]*)\)|(\w+)", side) for side in pattern.split("->")]
    disk, native = ([(group or axis).split() for group, axis in side] for side in (sides * 2)[:2])
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


def piece_of_groups(name: str, widths: Sequence[int], piece: int, groups: int, rest: Shape = ()) -> Expr:
    """One of several native tensors that lie together in checkpoint tensor `name`, group by group.

        piece_of_groups("query_key_value.weight", (64, 64, 64), 1, groups=12, rest=(768,))  # the keys

    The checkpoint tensor has the shape [groups * sum(widths), *rest]: of each group `widths[0]` rows of the
    first native tensor, then `widths[1]` of the second, and so on. The native tensor, [groups *
    widths[piece], *rest], has the rows of one of them alone, the groups in the same order.
    """
    width, start = sum(widths), sum(widths[:piece])
    shape = (groups, width, *rest)
    dims = tuple(range(len(shape)))
    opened = Permute(Ref(name, (groups * width, *rest)), shape, dims, shape)
    cut = Rows(opened, start, start + widths[piece], dim=1)
    return Permute(cut, cut.shape, dims, (groups * widths[piece], *rest))


WeightMap = Mapping[str, Expr]


def connected(weight_map: WeightMap) -> list[dict[str, Expr]]:
    """A weight map in the smallest sets that share no checkpoint tensor: most natives are one alone, and the
    parts of a tensor that a checkpoint holds whole are together. In the map's order.
    """
    home: dict[str, int] = {}  # of a checkpoint tensor, the set that holds it
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
    """The checkpoint tensors that a weight map names, with their shapes, in order.

    Raises:
        ValueError: two places of the map name one tensor, so that a write would lose one of them.
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
    """Raises ValueError unless each element of the checkpoint's tensors has one place, as writing needs."""
    places_by_ref((expr, torch.empty(expr.shape, device="meta")) for expr in weight_map.values())


def _is_disjoint(name: str, exprs: Sequence[Expr]) -> bool:
    """Whether no element of a checkpoint tensor is used twice."""
    places = [place for expr in exprs for place in expr.places(torch.empty(expr.shape, device="meta"))]
    ranges = sorted((place.start, place.stop) for place in places if place.ref.name == name)
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
