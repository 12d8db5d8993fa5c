"""The weight algebra: a native tensor as an expression over the tensors of a checkpoint.

    gate_up = Cat((Ref("gate_proj.weight", (96, 64)), Ref("up_proj.weight", (96, 64))))  # [192, 64]

`Ref` names one checkpoint tensor, `Cat` concatenates, `Stack` adds a leading dimension, `Permute` reorders
(`permuted` writes one down as "e h (i 2) -> e (2 i) h"), `Rows` cuts out a shard. Nothing computes on values,
so every expression moves elements and has an exact inverse.

All of it rests on one question, which each kind answers for itself: where in the native tensor do the
checkpoint's elements lie? `places` tells, as strided views: reading fills them, writing reads them out.

A weight map is a dict from the native tensor's name to its expression.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]

Fetch = Callable[[str, Tensor, int, int], None]
"""`fetch(name, dest, start, stop)` fills `dest`, a strided view of any shape, with the elements [start, stop)
of tensor `name`, which are counted in the tensor's own order, as they lie in its file.
"""


class Place(NamedTuple):
    """Where elements of a checkpoint tensor lie: [start, stop) of `ref`, in order, are those of `view`.

    `view` need not have the shape that they have in the checkpoint: where no strides give it, dimensions of
    it are divided.
    """

    ref: Ref
    start: int
    stop: int
    view: Tensor


class Expr:
    """What `Ref`, `Cat`, `Stack`, `Permute` and `Rows` have in common."""

    shape: Shape

    def refs(self) -> Iterator[Ref]:
        """The checkpoint tensors, in order."""
        raise NotImplementedError

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        """The same expression with another one in the place of each `Ref`."""
        raise NotImplementedError

    def places(self, tensor: Tensor) -> Iterator[Place]:
        """Where in `tensor`, a native one of this expression's shape, the checkpoint's elements lie.

        Raises:
            ValueError: `tensor` has another shape than the expression.
        """
        raise NotImplementedError

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        """The native tensor from whole checkpoint tensors, `get(name)`.

        Raises:
            ValueError: a tensor has another shape than its `Ref` says.
        """
        found = {ref: get(ref.name) for ref in self.refs()}
        for ref, tensor in found.items():
            _check_shape(f"tensor {ref.name!r}", tensor.shape, ref.shape)
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in found.values()])
        native = torch.empty(self.shape, dtype=dtype, device=next(iter(found.values())).device)
        for ref, start, stop, view in self.places(native):
            view.copy_(found[ref].reshape(-1)[start:stop].view(view.shape))
        return native

    def read_into(self, dest: Tensor, fetch: Fetch) -> None:
        """Fills `dest` with the whole native tensor. Every fetch goes straight into a view of `dest`."""
        for ref, start, stop, view in self.places(dest):
            fetch(ref.name, view, start, stop)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        """The checkpoint tensors of a native one (or their gradients, from its gradient), by name: views of
        it, but for those that no strides describe, which are copies.

        Raises:
            ValueError: `tensor` has another shape than the expression, or holds only rows of one of them.
        """
        return write([(self, tensor)])


@dataclass(frozen=True)
class Ref(Expr):
    """One tensor of the checkpoint.

    In a canonical form, `axes` are the sizes that the module names (`layout.canonical_forms`), by which a
    layout divides the tensor. They are no part of what the tensor is.
    """

    name: str
    shape: Shape
    axes: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def refs(self) -> Iterator[Ref]:
        yield self

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        return replace(self)

    def places(self, tensor: Tensor) -> Iterator[Place]:
        _check_native(self, tensor)
        yield Place(self, 0, tensor.numel(), tensor)


@dataclass(frozen=True)
class Cat(Expr):
    """`parts` one after the other along `dim`."""

    parts: tuple[Expr, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("Cat needs at least one part")
        first = self.parts[0]
        if not 0 <= self.dim < len(first.shape):
            raise ValueError(
                f"Cat along dim {self.dim} of {_describe(first)}, which has shape {first.shape}; expected a "
                "dimension of it"
            )
        for part in self.parts[1:]:
            if _without(part.shape, self.dim) != _without(first.shape, self.dim):
                raise ValueError(
                    f"Cat along dim {self.dim} joins {_describe(first)} of shape {first.shape} with "
                    f"{_describe(part)} of shape {part.shape}; the other dimensions must be equal"
                )

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def refs(self) -> Iterator[Ref]:
        for part in self.parts:
            yield from part.refs()

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        return Cat(tuple(part.with_refs(replace) for part in self.parts), self.dim)

    def places(self, tensor: Tensor) -> Iterator[Place]:
        _check_native(self, tensor)
        sizes = [part.shape[self.dim] for part in self.parts]
        for part, piece in zip(self.parts, tensor.split(sizes, dim=self.dim), strict=True):
            yield from part.places(piece)


@dataclass(frozen=True)
class Stack(Expr):
    """`parts`, all of one shape, along a new leading dimension."""

    parts: tuple[Expr, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("Stack needs at least one part")
        first = self.parts[0]
        for part in self.parts[1:]:
            if part.shape != first.shape:
                raise ValueError(
                    f"Stack of {_describe(first)} of shape {first.shape} and {_describe(part)} of shape "
                    f"{part.shape}; the shapes must be equal"
                )

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return (len(self.parts), *self.parts[0].shape)

    def refs(self) -> Iterator[Ref]:
        for part in self.parts:
            yield from part.refs()

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        return Stack(tuple(part.with_refs(replace) for part in self.parts))

    def places(self, tensor: Tensor) -> Iterator[Place]:
        _check_native(self, tensor)
        for part, piece in zip(self.parts, tensor.unbind(0), strict=True):
            yield from part.places(piece)


@dataclass(frozen=True)
class Permute(Expr):
    """`part.view(view).permute(order).reshape(shape)`, as torch has them.

    `view` divides dimensions of the part, and `shape` joins neighbours after the permutation; nothing else
    is a reordering with an inverse of the same kind. `permuted` makes it from a line of text.
    """

    part: Expr
    view: Shape
    order: tuple[int, ...]
    shape: Shape

    def __post_init__(self) -> None:
        for name in ("view", "order", "shape"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        what = f"Permute of {_describe(self.part)} of shape {self.part.shape}"
        if sorted(self.order) != list(range(len(self.view))):
            raise ValueError(
                f"{what}: the order {self.order} is no permutation of the dimensions {self.view}"
            )
        if not _divides(self.view, self.part.shape):
            raise ValueError(f"{what}: the view {self.view} does not divide its dimensions")
        if not _divides(self._permuted, self.shape):
            raise ValueError(f"{what}: {self._permuted} cannot be joined to {self.shape}")
        if not isinstance(self.part, Ref) and self.view != self.part.shape:
            raise ValueError(f"{what}: only the dimensions of a Ref can be divided; permute each Ref instead")

    @property
    def _permuted(self) -> Shape:
        return tuple(self.view[dim] for dim in self.order)

    def refs(self) -> Iterator[Ref]:
        yield from self.part.refs()

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        return dataclasses.replace(self, part=self.part.with_refs(replace))

    def places(self, tensor: Tensor) -> Iterator[Place]:
        _check_native(self, tensor)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        view = tensor.view(self._permuted).permute(back)  # always a view: dimensions are divided, not joined
        if isinstance(self.part, Ref):
            yield Place(self.part, 0, view.numel(), view)
        else:
            yield from self.part.places(view)


@dataclass(frozen=True)
class Rows(Expr):
    """The rows [start, stop) of `part`, or its columns with `dim=1`, and so on: a shard. Reading it fetches
    its own elements alone.

    Shards by rows (FSDP) are `Rows(whole, start, stop)`; by heads, a `Cat` of `Rows` of query, key and value;
    by experts, `Rows` of a `Stack`. Only shards that together have all of a tensor can write it.
    """

    part: Expr
    start: int
    stop: int
    dim: int = 0

    def __post_init__(self) -> None:
        rows = (self.part.shape or (1,))[self.dim]
        if not 0 <= self.start <= self.stop <= rows:
            raise ValueError(f"rows [{self.start}, {self.stop}) of {_describe(self.part)}, which has {rows}")

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        shape = list(self.part.shape)
        if shape:
            shape[self.dim] = self.stop - self.start
        return tuple(shape)

    def refs(self) -> Iterator[Ref]:
        yield from self.part.refs()

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        return dataclasses.replace(self, part=self.part.with_refs(replace))

    def places(self, tensor: Tensor) -> Iterator[Place]:
        """Two tensors without memory stand for the whole: one strided as `tensor`, and one whose elements are
        the numbers of their rows. Where the numbers of a place are those asked for is read off the strides.
        """
        _check_native(self, tensor)
        shape = self.part.shape
        if self.shape == shape:
            yield from self.part.places(tensor)
        if tensor.numel() == 0 or self.shape == shape:
            return
        whole = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        along = [int(dim == self.dim) for dim in range(len(shape))]
        numbers = torch.empty_strided(shape, along, device="meta")
        first = tensor.storage_offset() - self.start * tensor.stride(self.dim)
        for place, number in zip(self.part.places(whole), self.part.places(numbers), strict=True):
            rows = number.view
            for box in _boxes(rows.shape, rows.stride(), int(rows.storage_offset()), self.start, self.stop):
                view = place.view[box]
                begin = place.start + _element(rows.shape, box)
                view = tensor.as_strided(view.shape, view.stride(), first + view.storage_offset())
                yield Place(place.ref, begin, begin + view.numel(), view)


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


def write(natives: Iterable[tuple[Expr, Tensor]]) -> dict[str, Tensor]:
    """`Expr.write` of tensors that together hold whole checkpoint tensors, each maybe rows of them alone."""
    written: dict[str, Tensor] = {}
    for ref, places in places_by_ref(natives).items():
        if len(places) == 1:
            written[ref.name] = places[0].view.reshape(ref.shape)
        else:
            written[ref.name] = torch.cat([view.reshape(-1) for *_, view in places]).view(ref.shape)
    return written


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


def places_by_ref(natives: Iterable[tuple[Expr, Tensor]]) -> dict[Ref, list[Place]]:
    """The places of whole checkpoint tensors, of each in the order of its elements."""
    found: dict[Ref, list[Place]] = {}
    for expr, tensor in natives:
        found |= {ref: found.get(ref, []) for ref in expr.refs()}
        for place in expr.places(tensor):
            found[place.ref].append(place)
    for ref, places in found.items():
        places.sort(key=lambda place: place.start)
        ends = [0, *(place.stop for place in places)]
        if [*(place.start for place in places), math.prod(ref.shape)] != ends:
            raise ValueError(
                f"of checkpoint tensor {ref.name!r} some elements have no place in the model, or two"
            )
    return found


def _boxes(
    sizes: Sequence[int], strides: Sequence[int], low: int, start: int, stop: int
) -> Iterator[tuple[int | slice, ...]]:
    """The indices at which `low + sum(index * stride)` is within [start, stop), as boxes: some integers, at
    most one slice behind them, and whatever the further dimensions hold.
    """
    span = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if low + span < start or low >= stop:
        return
    if start <= low and low + span < stop:
        yield ()
        return
    n, stride = sizes[0], strides[0]
    inner = span - (n - 1) * stride
    some, full = range(n), range(0)
    if stride:
        some = range(max(0, -((low + inner - start) // stride)), min(n, (stop - 1 - low) // stride + 1))
        full = range(max(0, -((low - start) // stride)), min(n, (stop - 1 - low - inner) // stride + 1))
    if full:
        yield (slice(full.start, full.stop),)
    for i in some:
        if i not in full:
            for box in _boxes(sizes[1:], strides[1:], low + i * stride, start, stop):
                yield (i, *box)


def _element(sizes: Sequence[int], box: tuple[int | slice, ...]) -> int:
    """The number of the first element of a box."""
    element = 0
    for size, index in zip(sizes, (*box, *[0] * (len(sizes) - len(box))), strict=True):
        element = element * size + (index.start if isinstance(index, slice) else index)
    return element


def _is_disjoint(name: str, exprs: Sequence[Expr]) -> bool:
    """Whether no element of a checkpoint tensor is used twice."""
    places = [place for expr in exprs for place in expr.places(torch.empty(expr.shape, device="meta"))]
    ranges = sorted((place.start, place.stop) for place in places if place.ref.name == name)
    return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


def _divides(fine: Shape, coarse: Shape) -> bool:
    """Whether consecutive dimensions of `fine` multiply to those of `coarse`, in order."""
    rest = list(fine)
    for size in coarse:
        product = 1
        while rest and (product < size or rest[0] == 1):
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest


def _check_native(expr: Expr, tensor: Tensor) -> None:
    if tensor.shape != expr.shape:
        _check_shape(f"the native tensor of {_describe(expr)}", tensor.shape, expr.shape)


def _check_shape(what: str, found: Iterable[int], expected: Shape) -> None:
    if tuple(found) != expected:
        raise ValueError(f"{what} has shape {tuple(found)}, expected {expected}")


def _describe(expr: Expr) -> str:
    names = [ref.name for ref in expr.refs()]
    return (
        repr(names[0])
        if len(names) == 1
        else f"{type(expr).__name__}({names[0]!r}, ... {len(names)} tensors)"
    )


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])
