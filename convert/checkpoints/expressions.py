"""Weight algebra: native tensors as expressions over checkpoint tensors.

    gate_up = Cat((Ref("gate_proj.weight", (96, 64)), Ref("up_proj.weight", (96, 64))))  # [192, 64]

`Ref` names one checkpoint tensor, `Cat` concatenates, `Stack` adds a leading dimension, `Permute` reorders
(`permuted` builds one from a pattern such as "e h (i 2) -> e (2 i) h"), `Rows` cuts out a shard. Expressions
only move elements, so each has an exact inverse. `Zeros` is a tensor that a checkpoint does not have.

Each kind implements `places`: strided views of the native tensor that hold the checkpoint's elements. Reading
fills these views, writing copies them out.
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
    """Location of checkpoint elements: [start, stop) of `ref` are the elements of `view`, in order.

    `view` may divide dimensions of the checkpoint's shape, where strides cannot express that shape.
    """

    ref: Ref
    start: int
    stop: int
    view: Tensor


class Expr:
    """Base class of `Ref`, `Zeros`, `Cat`, `Stack`, `Permute` and `Rows`."""

    shape: Shape

    def refs(self) -> Iterator[Ref]:
        """Yield the checkpoint tensors, in order."""
        raise NotImplementedError

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        """Return the expression with each `Ref` replaced."""
        raise NotImplementedError

    def places(self, tensor: Tensor) -> Iterator[Place]:
        """Yield the places of the checkpoint's elements in a native `tensor` of this expression's shape.

        Raises:
            ValueError: `tensor` does not have the expression's shape.
        """
        raise NotImplementedError

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        """Build the native tensor from whole checkpoint tensors, `get(name)`.

        Raises:
            ValueError: a tensor does not have its `Ref`'s shape.
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
        """Fill `dest` with the native tensor. Every fetch writes directly to a view of `dest`."""
        if next(self.refs(), None) is None:
            dest.zero_()
        for ref, start, stop, view in self.places(dest):
            fetch(ref.name, view, start, stop)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint tensors of a native tensor, or their gradients from its gradient, by name.
        They are views where strides allow, else copies.

        Raises:
            ValueError: `tensor` does not have the expression's shape, or holds only some rows of one of them.
        """
        return write([(self, tensor)])


@dataclass(frozen=True)
class Ref(Expr):
    """Checkpoint tensor.

    In a canonical form, `axes` are sizes named by the module (`layout.canonical_forms`), by which a layout
    divides the tensor. They do not count in comparisons.
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
class Zeros(Expr):
    """Native tensor that the checkpoint does not have, and whose elements are all zero. Writing drops it:
    whoever writes checks first that they still are.
    """

    shape: Shape

    def refs(self) -> Iterator[Ref]:
        yield from ()

    def with_refs(self, replace: Callable[[Ref], Expr]) -> Expr:
        return self

    def places(self, tensor: Tensor) -> Iterator[Place]:
        _check_native(self, tensor)
        yield from ()

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        return torch.zeros(self.shape)


@dataclass(frozen=True)
class Cat(Expr):
    """Concatenation of `parts` along `dim`."""

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
    """Stack of equally shaped `parts` along a new leading dimension."""

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
    """Reordering `part.view(view).permute(order).reshape(shape)`, with torch's semantics.

    `view` may only divide dimensions and `shape` may only join neighbours, so that the inverse has the same
    form. `permuted` builds one from a pattern.
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
                f"{what}: the order {self.order} is not a permutation of the dimensions {self.view}"
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
    """Shard of `part`: its rows [start, stop), or columns with `dim=1`, and so on. Reading fetches only the
    shard's elements.

    Shards by rows (FSDP) are `Rows(whole, start, stop)`; by heads, a `Cat` of `Rows` of query, key and value;
    by experts, `Rows` of a `Stack`. Writing a tensor needs shards that together cover it.
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
        """Find the places of the shard, using two tensors without storage for the whole: one strided as
        `tensor`, one whose elements are row numbers. Strides tell where row numbers are in [start, stop).
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
    """Write tensors that together cover whole checkpoint tensors, though each may hold only some rows."""
    written: dict[str, Tensor] = {}
    for ref, places in places_by_ref(natives).items():
        if len(places) == 1:
            written[ref.name] = places[0].view.reshape(ref.shape)
        else:
            written[ref.name] = torch.cat([view.reshape(-1) for *_, view in places]).view(ref.shape)
    return written


def places_by_ref(natives: Iterable[tuple[Expr, Tensor]]) -> dict[Ref, list[Place]]:
    """Return the places of whole checkpoint tensors, each in element order."""
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
                f"some elements of checkpoint tensor {ref.name!r} have no place in the model, or two"
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
    if not names:
        return "a tensor of zeros"
    return (
        repr(names[0])
        if len(names) == 1
        else f"{type(expr).__name__}({names[0]!r}, ... {len(names)} tensors)"
    )


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])
