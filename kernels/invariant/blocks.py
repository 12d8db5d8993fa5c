"""Matrix products in which no row depends on the others, or on how many there are.

    y[r] = alpha * x[r] @ W + beta * c[r]         with the same bits for the same x[r] and c[r], in any batch

Matrix libraries choose tiles, and whether to split the sum over the inner dimension, by the shape of a
product. Rows are therefore multiplied in blocks of one shape, `BLOCK` rows, the last of which is padded; a
shorter last block is padded to fewer rows if that gives the same bits. Both are verified by experiment, once
for each kind of product in a process: the rows of random operands must have the same bits in another order
and in shorter blocks. Where a library fails this test, blocks have fewer rows, down to a single row on a CPU.

An H200 multiplies blocks of 4,096 rows at full speed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096
_CPU_BLOCK = 64
_ROLL = 37  # rows by which the test shifts operands: prime, so that they fall into other tiles and positions


class Kind(NamedTuple):
    """Everything that a library's choice may depend on, apart from the number of rows.

    Attributes:
        inner, width: the sizes of W [inner, width]; strides: its strides.
        added: c: "nothing", a "row" for all, or "rows".
        precision: torch's setting for float32 products.
    """

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    inner: int
    width: int
    strides: tuple[int, int]
    added: str
    beta: float
    alpha: float
    precision: str


def product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """alpha * a @ b + beta * c, with rows as described above.

    Args:
        a: [T, K]; b: [K, N]; c: [N] or [T, N], or a shape that broadcasts to the latter.
        out: [T, N], which may be c.
        out_dtype: dtype of the result, on a GPU; by default a's.

    Raises:
        RuntimeError: on a GPU, no size of blocks gives rows that are independent of their place.
    """
    rows, (inner, width) = len(a), b.shape
    if out is None:
        out = a.new_empty(rows, width, dtype=out_dtype or a.dtype)
    if c is not None and beta == 0:
        c = None
    if not rows * inner * width:
        return _multiply(a, b, c, out, beta, alpha)
    if c is not None and c.dim() == 2:
        c = c.expand(rows, width)
    added = "nothing" if c is None else "row" if c.dim() < 2 else "rows"
    precision = torch.get_float32_matmul_precision() if a.dtype == torch.float32 else ""
    operands = a.device, a.dtype, out.dtype, inner, width, b.stride()
    sizes = _sizes_of(Kind(*operands, added, float(beta), float(alpha), precision))  # type: ignore[arg-type]
    a = _aligned(a)
    direct = out.is_contiguous() and _is_aligned(out)
    for start, end, size in _blocks(rows, sizes):
        x = _padded(a[start:end], size)
        own = c if c is None or added == "row" else _padded(c[start:end].contiguous(), size)
        if direct and end - start == size:
            _multiply(x, b, own, out[start:end], beta, alpha)
        else:
            y = _multiply(x, b, own, out.new_empty(size, width), beta, alpha)
            out[start:end] = y[: end - start]
    return out


def by_rows(function, x: Tensor, rows: int = 1024) -> Tensor:
    """function(x) in blocks of `rows` of x [T, ...], for a function of each row that has T rows, too."""
    parts = [function(_padded(x[i : i + rows], rows))[: len(x) - i] for i in range(0, len(x), rows)]
    return torch.cat(parts) if parts else function(x)


def _blocks(rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """First and last row (exclusive) of each block, and the rows to which it is padded."""
    block = sizes[-1]
    for start in range(0, rows, block):
        count = min(block, rows - start)
        yield start, start + count, next(size for size in sizes if size >= count)


@functools.cache
def _sizes_of(kind: Kind) -> tuple[int, ...]:
    """Sizes of blocks in which rows have the same bits, ascending; the last one is that of full blocks."""
    on_gpu = kind.device.type != "cpu"
    largest = BLOCK if on_gpu else _CPU_BLOCK
    generator = torch.Generator(kind.device).manual_seed(0)
    span = sum((n - 1) * stride for n, stride in zip((kind.inner, kind.width), kind.strides, strict=True)) + 1

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=kind.device).normal_(generator=generator)

    a, b = draw(largest, kind.inner, dtype=kind.dtype), draw(span, dtype=kind.dtype)
    b = b.as_strided((kind.inner, kind.width), kind.strides)
    c = None
    if kind.added != "nothing":
        c = draw(*([] if kind.added == "row" else [largest]), kind.width, dtype=kind.out_dtype)

    def run(rows: slice | Tensor) -> Tensor:
        x = a[rows].contiguous()
        own = c if c is None or kind.added == "row" else c[rows].contiguous()
        y = torch.empty(len(x), kind.width, dtype=kind.out_dtype, device=kind.device)
        return _multiply(x, b, own, y, kind.beta, kind.alpha)

    size = largest
    while size > (16 if on_gpu else 1):
        whole, order = run(slice(0, size)), torch.arange(size, device=kind.device).roll(_ROLL)
        if torch.equal(run(order), whole[order]):
            smaller = {size >> shift for shift in range(1, 7)} | {size * n // 8 for n in (3, 5, 6, 7)}
            same = [
                n
                for n in sorted(smaller - {0, 1})
                if torch.equal(run(slice(0, n)), whole[:n])
                and torch.equal(run(slice(size - n, size)), whole[size - n :])
            ]
            return *same, size
        size //= 2
    if on_gpu:
        raise RuntimeError(
            f"products of {kind.dtype} with a matrix of {kind.inner} x {kind.width} give a row bits that "
            f"depend on its place in a block, on {kind.device}: they cannot run in batch_invariant()"
        )
    return (1,)


def _multiply(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, beta: float, alpha: float) -> Tensor:
    wide = {"out_dtype": out.dtype} if out.dtype != a.dtype else {}
    if c is None and alpha == 1:
        return torch.mm(a, b, out=out, **wide)
    if c is None:
        return torch.addmm(out, a, b, beta=0, alpha=alpha, out=out, **wide)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out, **wide)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 64 == 0


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it, with adjacent rows from an aligned address on."""
    x = x.contiguous()
    return x if _is_aligned(x) else x.clone()


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return _aligned(x)
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: len(x)] = x
    return padded
