"""Packing of units into rows of `seq_len` inputs, without padding.

Text fills each row completely and continues in the next. Examples with a prompt stay whole: a row is filled
by best fit from at most `WAITING` of them. It starts with the one that has waited longest, to keep the random
order, then repeatedly takes the longest that fits; text fills the rest. At the end of the stream, rows start
with the longest example (best fit decreasing). The result depends only on the units and their order.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

WAITING = 2048


class Piece(NamedTuple):
    """Inputs tokens[start:stop] of one document, with labels tokens[start + 1 : stop + 1]."""

    start: int
    stop: int


Row = list[Piece]


class Unit(NamedTuple):
    """At most `seq_len` inputs of one document; `whole` ones are not cut."""

    start: int
    length: int
    whole: bool


def pack(units: Iterable[Unit], seq_len: int, waiting: int = WAITING) -> Iterator[Row]:
    """Yield rows of at most `seq_len` inputs, with each input of the units exactly once."""
    examples, text = _Examples(), _Text()
    for unit in units:
        if not unit.whole:
            if unit.length == seq_len:
                yield [Piece(unit.start, unit.start + seq_len)]
                continue
            text.add(unit)
            # Keep one row's worth of text to fill rows of examples.
            if text.length >= 2 * seq_len:
                yield text.take(seq_len)
            continue
        examples.add(unit)
        if len(examples) > waiting:
            yield _row(examples, text, seq_len, examples.pop_oldest())
    while examples:
        yield _row(examples, text, seq_len, examples.pop_longest(seq_len))
    while text.length:
        yield text.take(seq_len)


def _row(examples: _Examples, text: _Text, seq_len: int, first: Unit | None) -> Row:
    row: Row = []
    room, unit = seq_len, first
    while unit is not None:
        row.append(Piece(unit.start, unit.start + unit.length))
        room -= unit.length
        unit = examples.pop_longest(room)
    return row + text.take(room)


class _Examples:
    """Examples waiting for a row, by length and by age."""

    def __init__(self) -> None:
        self.by_length: list[tuple[int, int, Unit]] = []  # length, number, unit
        self.by_age: deque[tuple[int, int, Unit]] = deque()
        self.taken: set[int] = set()  # numbers that by_age still holds
        self.count = 0

    def __len__(self) -> int:
        return len(self.by_length)

    def add(self, unit: Unit) -> None:
        entry = (unit.length, self.count, unit)
        self.count += 1
        insort(self.by_length, entry)
        self.by_age.append(entry)

    def pop_longest(self, room: int) -> Unit | None:
        """Remove and return the longest example that fits in `room`."""
        place = bisect_right(self.by_length, room, key=lambda entry: entry[0])
        if place == 0:
            return None
        _, number, unit = self.by_length.pop(place - 1)
        self.taken.add(number)
        return unit

    def pop_oldest(self) -> Unit:
        while self.by_age[0][1] in self.taken:
            self.taken.discard(self.by_age.popleft()[1])
        entry = self.by_age.popleft()
        self.by_length.pop(bisect_right(self.by_length, entry) - 1)
        return entry[2]


class _Text:
    """Queue of text waiting for a row."""

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()
        self.length = 0

    def add(self, unit: Unit) -> None:
        self.pieces.append(Piece(unit.start, unit.start + unit.length))
        self.length += unit.length

    def take(self, room: int) -> Row:
        """Take up to `room` inputs of text, cutting the last piece if needed."""
        row: Row = []
        while room and self.pieces:
            piece = self.pieces.popleft()
            cut = min(piece.stop, piece.start + room)
            if cut < piece.stop:
                self.pieces.appendleft(Piece(cut, piece.stop))
            row.append(Piece(piece.start, cut))
            room -= cut - piece.start
            self.length -= cut - piece.start
        return row
