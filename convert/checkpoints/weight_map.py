"""The weight algebra: a native parameter as an expression over the tensors of a checkpoint.

    gate_up = Cat((Ref("gate_proj.weight", (96, 64)), Ref("up_proj.weight", (96, 64))))  # [192, 64]

`Ref` names one checkpoint tensor, `Cat` concatenates, `Stack` adds a leading dimension, `Transpose`
exchanges the last two. Nothing computes on values, so every expression is a permutation of elements and has
an exact inverse. One expression serves four uses: reading a parameter whole, reading only the rows that a
shard needs, writing it back as views, and naming gradients (or optimizer moments) after the checkpoint's
tensors.

A weight map is a dict from the native parameter's name to its expression.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]

Fetch = Callable[[str, Tensor, int, int], None]
"""`fetch(name, dest, start, stop)` fills `dest`, any strided view, with the rows [start, stop) of tensor
`name`.

Rows are along dimension 0; a tensor without dimensions counts as one row.
"""


class Expr:
    """What `Ref`, `Cat`, `Stack` and `Transpose` have in common."""

    shape: Shape

    def refs(self) -> Iterator["Ref"]:
        """The checkpoint tensors, in order."""
        raise NotImplementedError

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        """The native parameter from whole checkpoint tensors, `get(name)`.

        Raises:
            ValueError: a tensor has another shape than its `Ref` says.
        """
        raise NotImplementedError

    def read_rows(self, dest: Tensor, fetch: Fetch, start: int, stop: int) -> None:
        """Fills `dest` with the rows [start, stop) of the native parameter, fetching only what they need.

        Every fetch goes straight into a view of `dest`, except the columns of a two-dimensional `Transpose`.

        Raises:
            ValueError: `dest` has another shape than these rows.
        """
        raise NotImplementedError

    def read_into(self, dest: Tensor, fetch: Fetch) -> None:
        """Fills `dest` with the whole native parameter."""
        self.read_rows(dest, fetch, 0, row_count(self.shape))

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        """The checkpoint tensors as views of a native parameter (or of its gradient), by name.

        Raises:
            ValueError: `tensor` has another shape than the expression.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Ref(Expr):
    """One tensor of the checkpoint."""

    name: str
    shape: Shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def refs(self) -> Iterator["Ref"]:
        yield self

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        tensor = get(self.name)
        _check_shape(f"tensor {self.name!r}", tensor.shape, self.shape)
        return tensor

    def read_rows(self, dest: Tensor, fetch: Fetch, start: int, stop: int) -> None:
        _check_rows(self, dest, start, stop)
        fetch(self.name, dest, start, stop)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        _check_shape(f"the value of {self.name!r}", tensor.shape, self.shape)
        return {self.name: tensor}


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
            raise ValueError(f"Cat along dim {self.dim} of {_describe(first)}, which has shape {first.shape}")
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

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        return torch.cat([part.read(get) for part in self.parts], dim=self.dim)

    def read_rows(self, dest: Tensor, fetch: Fetch, start: int, stop: int) -> None:
        _check_rows(self, dest, start, stop)
        offset = 0
        for part in self.parts:
            size = part.shape[self.dim]
            if self.dim > 0:
                part.read_rows(dest.narrow(self.dim, offset, size), fetch, start, stop)
            else:
                low, high = max(start, offset), min(stop, offset + size)
                if low < high:
                    part.read_rows(dest[low - start : high - start], fetch, low - offset, high - offset)
            offset += size

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        _check_shape(f"the value of {_describe(self)}", tensor.shape, self.shape)
        sizes = [part.shape[self.dim] for part in self.parts]
        pieces = zip(self.parts, tensor.split(sizes, dim=self.dim), strict=True)
        return _merge(part.write(piece) for part, piece in pieces)


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

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        return torch.stack([part.read(get) for part in self.parts])

    def read_rows(self, dest: Tensor, fetch: Fetch, start: int, stop: int) -> None:
        _check_rows(self, dest, start, stop)
        for row, part in zip(dest.unbind(0), self.parts[start:stop], strict=True):
            part.read_into(row, fetch)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        _check_shape(f"the value of {_describe(self)}", tensor.shape, self.shape)
        return _merge(part.write(piece) for part, piece in zip(self.parts, tensor.unbind(0), strict=True))


@dataclass(frozen=True)
class Transpose(Expr):
    """`part` with its last two dimensions exchanged."""

    part: Expr

    def __post_init__(self) -> None:
        if len(self.part.shape) < 2:
            raise ValueError(
                f"Transpose of {_describe(self.part)}, whose shape {self.part.shape} is not a matrix"
            )

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        *leading, rows, columns = self.part.shape
        return (*leading, columns, rows)

    def refs(self) -> Iterator[Ref]:
        yield from self.part.refs()

    def read(self, get: Callable[[str], Tensor]) -> Tensor:
        return self.part.read(get).transpose(-1, -2).contiguous()

    def read_rows(self, dest: Tensor, fetch: Fetch, start: int, stop: int) -> None:
        _check_rows(self, dest, start, stop)
        if len(self.shape) > 2:
            self.part.read_rows(dest.transpose(-1, -2), fetch, start, stop)
        elif (start, stop) == (0, self.shape[0]):
            self.part.read_into(dest.transpose(-1, -2), fetch)
        else:  # rows of the result are columns of the part, and only rows can be fetched
            whole = torch.empty(self.part.shape, dtype=dest.dtype, device=dest.device)
            self.part.read_into(whole, fetch)
            dest.copy_(whole[:, start:stop].transpose(0, 1))

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        _check_shape(f"the value of {_describe(self)}", tensor.shape, self.shape)
        return self.part.write(tensor.transpose(-1, -2))


WeightMap = Mapping[str, Expr]


def checkpoint_shapes(weight_map: WeightMap) -> dict[str, Shape]:
    """The checkpoint tensors that a weight map names, with their shapes, in order.

    Raises:
        ValueError: two places of the map name one tensor, so that a write would lose one of them.
    """
    shapes: dict[str, Shape] = {}
    owner: dict[str, str] = {}
    for parameter, expr in weight_map.items():
        for ref in expr.refs():
            if ref.name in shapes:
                raise ValueError(
                    f"checkpoint tensor {ref.name!r} is used twice: by {owner[ref.name]!r} and {parameter!r}"
                )
            shapes[ref.name] = ref.shape
            owner[ref.name] = parameter
    return shapes


def row_count(shape: Shape) -> int:
    """The number of rows along dimension 0; a tensor without dimensions is one row."""
    return shape[0] if shape else 1


def _check_rows(expr: Expr, dest: Tensor, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= row_count(expr.shape):
        raise ValueError(f"rows [{start}, {stop}) of {_describe(expr)}, which has {row_count(expr.shape)}")
    expected = (stop - start, *expr.shape[1:]) if expr.shape else ()
    _check_shape(f"the destination of {_describe(expr)}", dest.shape, expected)


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


def _merge(pieces: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for piece in pieces:
        out.update(piece)
    return out
