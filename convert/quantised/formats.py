"""Formats of quantised weights, and their decoding in bands of rows.

    value = float32(code) * float32(scale of its block)

The product is computed in float32, and rounded once, to the dtype that is asked for. The last blocks of a
dimension may be cut off by its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.quantised.codes import PACKED, Codes, as_scale

Fetch = Callable[[str, int, int], Tensor]
"""`fetch(part, start, stop)` reads the elements [start, stop) of a part of a weight, on the CPU."""

MATRIX, ROW, COLUMN = (None, None), (1, None), (None, 1)  # blocks: the rows and columns that share a scale
CODES, SCALE, SECOND, ZERO, GROUPS = "codes", "scale", "second scale", "zero point", "groups"


class BadScaleError(Exception):
    """A scale that no quantiser writes; the message names its tensor."""


class Format:
    """Base class of formats.

    Attributes:
        label: for people, such as "float8, blocks of 128 x 128".
    """

    label: str

    def decode(
        self, weight: QuantisedWeight, fetch: Fetch, start: int, stop: int, device: torch.device
    ) -> Tensor:
        """Decode the elements [start, stop) of a weight, in row-major order: float32 [stop - start].

        Raises:
            BadScaleError: a scale is not finite, or not positive.
        """
        raise NotImplementedError

    def rows_of(self, role: str, shape: tuple[int, int], dtype: torch.dtype) -> int:
        """The number of equal rows into which a part of one matrix, in `dtype`, can be divided."""
        raise NotImplementedError

    def check_stack(
        self, shape: tuple[int, int], parts: Mapping[str, Tensor], name_of: Callable[[str, int], str]
    ) -> None:
        """Check the scales of matrices in memory, or of any number of rows of them.

        Args:
            name_of: the name of the tensor that holds a part of the matrix of this number.

        Raises:
            BadScaleError: a scale is not finite, or not positive.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight that several tensors of a checkpoint describe.

    Attributes:
        name: of the dense weight.
        shape: of the dense weight [..., rows, columns], in the order of its codes.
        format: of its parts.
        parts: the tensors that hold its codes, scales and so on.
        transposed: the last two dimensions are swapped, compared with the dense weight of this name.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    parts: Mapping[str, TensorInfo]
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(info.nbytes for info in self.parts.values())


@dataclass(frozen=True)
class Blocks(Format):
    """A matrix, or a stack of them, in rectangular blocks that share a scale.

    Attributes:
        codes: the stored numbers.
        block: rows and columns of a block; None for all of them.
        second: how a further scale of the whole matrix applies to the scales: "times", "divided by", or not.
        factor: of all values, multiplied last.
        allow_zero: a block of zeros may have the scale 0, to which small scales round in float8.
    """

    codes: Codes
    block: tuple[int | None, int | None]
    second: str | None = None
    factor: float | None = None
    allow_zero: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        match self.block:
            case (None, None):
                return f"{self.codes.label}, one scale a matrix"
            case 1, None:
                return f"{self.codes.label}, one scale a row"
            case None, 1:
                return f"{self.codes.label}, one scale a column"
            case 1, columns:
                return f"{self.codes.label}, groups of {columns}"
        return f"{self.codes.label}, blocks of {self.block[0]} x {self.block[1]}"

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The number of blocks along the rows and the columns of a dense `shape`."""
        rows, columns = shape[-2:]
        return -(-rows // (self.block[0] or rows or 1)), -(-columns // (self.block[1] or columns or 1))

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes that the scales of a dense `shape` may have, the usual one first."""
        stack, grid = shape[:-2], self.grid(shape)
        if self.block == (None, None):
            return [stack, (*stack, 1), (*stack, 1, 1)]
        return [(*stack, *grid), (*stack, grid[0])] if self.block[1] is None else [(*stack, *grid)]

    def rows_of(self, role: str, shape: tuple[int, int], dtype: torch.dtype) -> int:
        down = self.grid(shape)[0]
        packed = self._zeros_in_word(dtype)
        return {CODES: shape[0], SCALE: down, ZERO: -(-down // packed)}.get(role, 1)

    def check_stack(
        self, shape: tuple[int, int], parts: Mapping[str, Tensor], name_of: Callable[[str, int], str]
    ) -> None:
        for role in (SCALE, SECOND):
            if role in parts:
                check_scales(as_scale(parts[role]), partial(name_of, role), role == SCALE and self.allow_zero)
        if GROUPS in parts:
            self._check_groups(parts[GROUPS], shape, name_of(GROUPS, 0))

    def decode(
        self, weight: QuantisedWeight, fetch: Fetch, start: int, stop: int, device: torch.device
    ) -> Tensor:
        *_, rows, columns = weight.shape
        first, last = start // columns, -(-stop // columns)
        bands, row = [], first
        while row < last:
            matrix, top = divmod(row, rows)
            bottom = min(top + last - row, rows)
            bands.append(self._band(_Matrix(weight, fetch, matrix), top, bottom, device))
            row += bottom - top
        band = bands[0] if len(bands) == 1 else torch.cat(bands)
        return band.reshape(-1)[start - first * columns : stop - first * columns]

    def _band(self, matrix: _Matrix, top: int, bottom: int, device: torch.device) -> Tensor:
        rows, columns = matrix.weight.shape[-2:]
        values = self.codes.decode(matrix.part(CODES, rows, top, bottom).to(device))[:, :columns]
        height, width = self.block[0] or rows, self.block[1] or columns
        above, below = top // height, -(-bottom // height)
        scale = self._scales(matrix, above, below, device)
        block_of_row = torch.arange(top, bottom, device=device) // height - above
        scale = scale[block_of_row]  # [rows of the band, blocks along a row]
        groups = None
        if GROUPS in matrix.weight.parts:  # columns in groups of their own choice
            groups = self._groups(matrix).to(device)
        if ZERO in matrix.weight.parts:
            zero = self._zeros(matrix, above, below).to(device)[block_of_row]
            values = values - _spread(zero, width, columns, groups)
        values = _product(values, scale, width, groups)
        return values if self.factor is None else values * self.factor

    def _groups(self, matrix: _Matrix) -> Tensor:
        """The block of each column."""
        groups = matrix.part(GROUPS, 1, 0, 1)[0].long()
        self._check_groups(groups, matrix.weight.shape, matrix.weight.parts[GROUPS].name)
        return groups

    def _check_groups(self, groups: Tensor, shape: tuple[int, ...], name: str) -> None:
        count = self.grid(shape)[1]
        if groups.numel() and (groups.min() < 0 or groups.max() >= count):
            raise BadScaleError(
                f"tensor {name!r} holds the numbers {int(groups.min())} to {int(groups.max())}, but there "
                f"are {count} groups; the file is damaged: download it again"
            )

    def _scales(self, matrix: _Matrix, above: int, below: int, device: torch.device) -> Tensor:
        """The scales of some rows of blocks, float32 [rows, columns of blocks]."""
        weight, count = matrix.weight, self.grid(matrix.weight.shape)[0]
        scale = as_scale(matrix.part(SCALE, count, above, below).to(device))
        check_scales(scale[None], lambda _: weight.parts[SCALE].name, self.allow_zero)
        if self.second is None:
            return scale
        second = as_scale(matrix.part(SECOND, 1, 0, 1).to(device))
        check_scales(second[None], lambda _: weight.parts[SECOND].name, False)
        return scale * second if self.second == "times" else scale / second

    def _zeros(self, matrix: _Matrix, above: int, below: int) -> Tensor:
        """The zero points of some rows of blocks, float32; packed ones are packed along the rows."""
        count, info = self.grid(matrix.weight.shape)[0], matrix.weight.parts[ZERO]
        within = self._zeros_in_word(info.dtype)
        low, high = above // within, -(-below // within)
        words = matrix.part(ZERO, -(-count // within), low, high)
        return self.zeros(words[None], below - low * within)[0, above - low * within :]

    def _zeros_in_word(self, dtype: torch.dtype) -> int:
        return 32 // self.codes.bits if dtype == torch.int32 else 1

    def zeros(self, words: Tensor, rows: int) -> Tensor:
        """Zero points [M, rows, columns] in float32, of words that may hold several, one below another."""
        if words.dtype != torch.int32:
            return words.float()
        count, _, across = words.shape
        numbers = PACKED[self.codes.bits].decode(words.transpose(1, 2).reshape(count * across, -1))
        return numbers.view(count, across, -1)[..., :rows].transpose(1, 2)


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a stack."""

    weight: QuantisedWeight
    fetch: Fetch
    number: int

    def part(self, name: str, rows: int, top: int, bottom: int) -> Tensor:
        """The rows [top, bottom) of a part that has `rows` rows for each matrix: [bottom - top, width]."""
        matrices = math.prod(self.weight.shape[:-2])
        width = math.prod(self.weight.parts[name].shape) // (matrices * rows)
        first = self.number * rows
        found = self.fetch(name, (first + top) * width, (first + bottom) * width)
        return found.view(bottom - top, width)


def _product(values: Tensor, scale: Tensor, width: int, groups: Tensor | None) -> Tensor:
    """Multiply rows [rows, columns] by the scales of their blocks [rows, blocks]."""
    rows, columns = values.shape
    if groups is None and columns % width == 0:
        return (values.reshape(rows, -1, width) * scale[:, :, None]).view(rows, columns)
    return values * _spread(scale, width, columns, groups)


def _spread(of_blocks: Tensor, width: int, columns: int, groups: Tensor | None) -> Tensor:
    """Repeat the numbers of blocks for each of their columns."""
    if groups is not None:
        return of_blocks[:, groups]
    return of_blocks.repeat_interleave(width, 1)[:, :columns]


def check_scales(scale: Tensor, name_of: Callable[[int], str], allow_zero: bool) -> None:
    """Raise BadScaleError unless the scales [M, ...] of matrices, whose tensors `name_of` names, are finite
    and positive.
    """
    good = torch.isfinite(scale) & ((scale >= 0) if allow_zero else (scale > 0))
    if not good.all():
        number = int((~good).flatten(1).any(1).nonzero()[0, 0])
        raise BadScaleError(
            f"tensor {name_of(number)!r} holds the scale {scale[~good][0].item()}, but scales of weights are "
            "finite and positive; the file is damaged: download it again"
        )
