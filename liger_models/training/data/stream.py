"""Infinite stream of packed rows, in an order computed from (seed, epoch) and never stored.

Units are shuffled: whole examples, and stretches of text of at most `seq_len` inputs. In an epoch

    without weights     each unit occurs once;
    with weights w_i    part i yields k_i units, the share w_i / sum(w) of the inputs of all parts together:
                        k_i = round(share_i * inputs * units_i / inputs_i), at least 1.
                        Each pass over the part has its own order, and the next epoch continues the pass: no
                        unit repeats before the whole part was used.

One permutation mixes the draws of all parts, which are packed in that order. A position is an epoch and a
row, independent of the number of processes and of the rows read at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.training.data.documents import CHUNK, Documents, Part
from liger_models.training.data.packing import Row, Unit, pack
from liger_models.training.data.permutation import Permutation


class Position(NamedTuple):
    """Position in the stream: the next row is number `row` of `epoch`."""

    epoch: int
    row: int


START = Position(0, 0)


class Units:
    """Units of a part, indexed by number. Uses 8 bytes a document."""

    def __init__(self, part: Part, seq_len: int) -> None:
        self.part, self.seq_len = part, seq_len
        self.ends = torch.empty(len(part), dtype=torch.int64)  # units up to and with each document
        self.inputs = self.whole = self.full = done = 0
        for start, stop, whole in part.all_bounds():
            count = torch.where(whole, 1, (stop - start + seq_len - 1) // seq_len)
            self.ends[done : done + len(count)] = count
            done += len(count)
            self.inputs += int((stop - start).sum())
            self.whole += int(whole.sum())
            self.full += int(((stop - start) // seq_len).sum())
        self.ends = self.ends.cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return first token, number of inputs and `whole` of these units."""
        document = torch.searchsorted(self.ends, numbers, right=True)
        before = torch.where(document > 0, self.ends[(document - 1).clamp(min=0)], 0)
        start, stop, whole = self.part.bounds(document)
        start = start + (numbers - before) * self.seq_len
        return start, torch.where(whole, stop - start, (stop - start).clamp(max=self.seq_len)), whole


class Stream:
    """Infinite stream of packed rows from `position` on."""

    def __init__(self, documents: Documents, seq_len: int, seed: int, position: Position = START) -> None:
        self.documents, self.seq_len, self.seed = documents, seq_len, seed
        self.units = [Units(part, seq_len) for part in documents.parts]
        self.draws = self._share_out()
        self.position = position
        self._rows = self._from(position)

    def epoch(self, number: int) -> Iterator[Row]:
        """Yield the rows of an epoch."""
        return pack(self._in_order(number), self.seq_len)

    def take(self, count: int) -> list[Row]:
        rows = []
        for _ in range(count):
            row, self.position = next(self._rows)
            rows.append(row)
        return rows

    def count_rows(self, epochs: float) -> int:
        """Count the rows in this many epochs, which may be fractional."""
        whole = int(epochs)
        rows = sum(self.rows_of(e) for e in range(whole))
        if epochs > whole:
            rows += max(1, round((epochs - whole) * self.rows_of(whole)))
        return rows

    def rows_left(self, epochs: float) -> int:
        """Count the rows of that many epochs that remain."""
        done = sum(self.rows_of(e) for e in range(self.position.epoch)) + self.position.row
        return max(0, self.count_rows(epochs) - done)

    def efficiency(self) -> float:
        """Fraction of the positions in the first epoch's rows that hold an input."""
        return self._inputs_of(0) / (self.rows_of(0) * self.seq_len)

    @functools.cache  # noqa: B019  # a stream lives as long as its run
    def rows_of(self, epoch: int) -> int:
        if not any(units.whole for units in self.units) and len(self.units) == 1:
            full, inputs = self.units[0].full, self.units[0].inputs
            return full + -(-(inputs - full * self.seq_len) // self.seq_len)
        return sum(1 for _ in self.epoch(epoch))

    def _inputs_of(self, epoch: int) -> int:
        if all(k == len(units) for k, units in zip(self.draws, self.units, strict=True)):
            return sum(units.inputs for units in self.units)
        return sum(unit.length for unit in self._in_order(epoch))

    def _share_out(self) -> list[int]:
        """Compute the number of units of each part in an epoch."""
        weights = [part.weight for part in self.documents.parts if part.weight is not None]
        if not weights:
            return [len(units) for units in self.units]
        inputs = sum(units.inputs for units in self.units)
        return [
            max(1, round(weight / sum(weights) * inputs * len(units) / units.inputs))
            for weight, units in zip(weights, self.units, strict=True)
        ]

    def _in_order(self, epoch: int) -> Iterator[Unit]:
        total = sum(self.draws)
        order = Permutation(total, f"epoch {epoch} of seed {self.seed}")
        for first in range(0, total, CHUNK):
            places = order(torch.arange(first, min(first + CHUNK, total)))
            found = [torch.empty_like(places), torch.empty_like(places), torch.empty_like(places)]
            begin = 0
            for part, count in enumerate(self.draws):
                here = ((places >= begin) & (places < begin + count)).nonzero()[:, 0]
                for one, mine in zip(found, self._draw(part, epoch, places[here] - begin), strict=True):
                    one[here] = mine
                begin += count
            starts, lengths, whole = (one.tolist() for one in found)
            yield from map(Unit, starts, lengths, map(bool, whole))

    def _draw(self, part: int, epoch: int, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the units of these draws from a part in an epoch."""
        units, numbers = self.units[part], torch.empty_like(draws)
        draws = draws + epoch * self.draws[part]
        passes = draws // len(units)
        for number in passes.unique().tolist():
            now = passes == number
            order = Permutation(len(units), f"pass {number} through part {part} of seed {self.seed}")
            numbers[now] = order(draws[now] % len(units))
        start, length, whole = units.find(numbers)
        return start + self.documents.bases[part], length, whole.long()

    def _from(self, position: Position) -> Iterator[tuple[Row, Position]]:
        epoch, skip = position
        while True:
            for number, row in enumerate(self.epoch(epoch)):
                if number >= skip:
                    yield row, Position(epoch, number + 1)
            epoch, skip = epoch + 1, 0
