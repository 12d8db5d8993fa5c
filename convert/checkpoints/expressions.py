"""The weight algebra: a native tensor as an expression over the tensors of a checkpoint.

    gate_up = Cat((Ref("gate_proj.weight", (96, 64)), Ref("up_proj.weight", (96, 64))))  # [192, 64]

`Ref` names one checkpoint tensor, `Cat` concatenates, `Stack` adds a leading dimension, `Permute` reorders
(`permuted` writes one down as "e h (i 2) -> e (2 i) h"), `Rows` cuts out a shard. Nothing computes on values,
so every expression moves elements and has an exact inverse.

All of it rests on one question, which each kind answers for itself: where in the native tensor do the
checkpoint's elements lie? `places` tells, as strided views: reading fills them, writing reads them out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.convert.checkpoints.strides import boxes, divides, first_element

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
        if not divides(self.view, self.part.shape):
            raise ValueError(f"{what}: the view {self.view} does not divide its dimensions")
        if not divides(self._permuted, self.shape):
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
            for box in boxes(rows.shape, rows.stride(), int(rows.storage_offset()), self.start, self.stop):
                view = place.view[box]
                begin = place.start + first_element(rows.shape, box)
                view = tensor.as_strided(view.shape, view.stride(), first + view.storage_offset())
                yield Place(place.ref, begin, begin + view.numel(), view)


def write(natives: Iterable[tuple[Expr, Tensor]]) -> dict[str, Tensor]:
    """`Expr.write` of tensors that together hold whole checkpoint tensors, each maybe rows of them alone."""
    written: dict[str, Tensor] = {}
    for ref, places in places_by_ref(natives).items():
        if len(places) == 1:
            written[ref.name] = places[0].view.reshape(ref.shape)
        else:
            written[ref.name] = torch.cat([view.reshape(-1) for *_, view in places]).view(ref.shape)
    return written


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
