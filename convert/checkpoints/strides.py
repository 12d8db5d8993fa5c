"""Index arithmetic of strided views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def boxes(
    sizes: Sequence[int], strides: Sequence[int], low: int, start: int, stop: int
) -> Iterator[tuple[int | slice, ...]]:
    """Yield the indices where `low + sum(index * stride)` is within [start, stop), as boxes: leading
    integers, then at most one slice, then all of the remaining dimensions.
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
            for box in boxes(sizes[1:], strides[1:], low + i * stride, start, stop):
                yield (i, *box)


def first_element(sizes: Sequence[int], box: tuple[int | slice, ...]) -> int:
    """Return the flat index of the first element of a box."""
    element = 0
    for size, index in zip(sizes, (*box, *[0] * (len(sizes) - len(box))), strict=True):
        element = element * size + (index.start if isinstance(index, slice) else index)
    return element


def divides(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Return whether consecutive dimensions of `fine` multiply to the dimensions of `coarse`, in order."""
    rest = list(fine)
    for size in coarse:
        product = 1
        while rest and (product < size or rest[0] == 1):
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest
