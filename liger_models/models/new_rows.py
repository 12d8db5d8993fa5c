"""Reading a checkpoint with rows for new tokens, each the mean of the rows before them.

Rows that are the mean leave a language model nearly as it is. By Jensen's inequality the exponential of a
mean logit is at most the mean of the exponentials, so that k new tokens take at most k / (n + k) of the
probability from n old ones, in any context (Hewitt, 2021,
https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Random rows can have far larger logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from liger_models.convert.quantised.reader import ModelReader
from liger_models.kernels._dispatch import float64_device

AT_ONCE = 4096  # rows that are summed at once


def mean_row(pieces: Iterable[Tensor]) -> Tensor:
    """The mean over the first dimension of all pieces together, in float64."""
    sums, count = [], 0
    for piece in pieces:
        sums.append(piece.to(float64_device(piece.device)).sum(0, dtype=torch.float64))
        count += len(piece)
    return torch.stack(sums).sum(0) / count


class ReaderWithNewRows(ModelReader):
    """A reader of a checkpoint in which tensors may have new rows."""

    def __init__(self, folder: str | Path):
        self._new: dict[str, tuple[range, int, Tensor]] = {}  # rows, elements in the file, and the mean
        super().__init__(folder)

    def renew(self, name: str, rows: range) -> None:
        """Make these rows of a tensor the mean of all rows before them from now on, whether or not the file
        has rows there.

        Raises:
            ValueError: the file lacks rows before them.
        """
        info = self.tensors[name]
        if not 0 < rows.start <= info.shape[0]:
            raise ValueError(f"{name} has {info.shape[0]} rows, so new ones cannot begin at {rows.start}")
        mean = mean_row(self._pieces(name, rows.start)).to(info.dtype).reshape(-1)
        self._new[name] = rows, math.prod(info.shape), mean
        shape = (max(info.shape[0], rows.stop), *info.shape[1:])
        self.tensors[name] = replace(info, shape=shape, nbytes=math.prod(shape) * info.dtype.itemsize)

    def read_into(self, name: str, dest: Tensor, start: int = 0, stop: int | None = None) -> None:
        """As `ModelReader.read_into`; a tensor with new rows passes through memory of its own size."""
        if name not in self._new:
            return super().read_into(name, dest, start, stop)
        rows, in_file, mean = self._new[name]
        stop = math.prod(self.tensors[name].shape) if stop is None else stop
        whole, width = torch.empty(stop - start, dtype=mean.dtype), len(mean)
        if start < (end := min(stop, in_file)):
            super().read_into(name, whole[: end - start], start, end)
        first, last = max(start, rows.start * width), min(stop, rows.stop * width)
        if first < last:
            whole[first - start : last - start] = mean[torch.arange(first, last) % width]
        dest.detach().copy_(whole.view(dest.shape))

    def _pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        info = self.tensors[name]
        width = math.prod(info.shape[1:])
        for first in range(0, rows, AT_ONCE):
            last = min(first + AT_ONCE, rows)
            piece = torch.empty(last - first, *info.shape[1:], dtype=info.dtype)
            super().read_into(name, piece, first * width, last * width)
            yield piece
