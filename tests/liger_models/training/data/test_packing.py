"""Packing loses nothing, cuts no whole example, and leaves few positions empty."""

import random
from itertools import pairwise

import pytest
import torch

from liger_models.training.data.packing import Unit, pack
from liger_models.training.data.permutation import Permutation

SEQ_LEN = 512


def units_of(lengths, whole):
    start, units = 0, []
    for length in lengths:
        units.append(Unit(start, length, whole() if callable(whole) else whole))
        start += length + 1
    return units


def lengths_like(kind, rng, count):
    draw = {
        "uniform": lambda: rng.randint(1, SEQ_LEN),
        "short": lambda: min(SEQ_LEN, 1 + int(rng.lognormvariate(4, 1))),
        "long": lambda: rng.randint(SEQ_LEN // 3, SEQ_LEN),
        "half": lambda: SEQ_LEN // 2 + rng.randint(-3, 3),
    }[kind]
    return [draw() for _ in range(count)]


def first_fit(lengths):
    rooms = []
    for length in lengths:
        place = next((i for i, room in enumerate(rooms) if room >= length), None)
        if place is None:
            rooms.append(SEQ_LEN - length)
        else:
            rooms[place] -= length
    return len(rooms)


def next_fit(lengths):
    rows, room = 0, 0
    for length in lengths:
        if length > room:
            rows, room = rows + 1, SEQ_LEN
        room -= length
    return rows


def held(rows):
    return sorted(piece for row in rows for piece in row)


def length_of(row):
    return sum(piece.stop - piece.start for piece in row)


@pytest.mark.parametrize("waiting", [1, 7, 10_000])
def test_every_example_is_uncut_in_one_row_for_any_queue_length(waiting):
    units = units_of(lengths_like("short", random.Random(0), 700), whole=True)
    rows = list(pack(units, SEQ_LEN, waiting))
    assert held(rows) == sorted((u.start, u.start + u.length) for u in units)
    assert max(map(length_of, rows)) <= SEQ_LEN


@pytest.mark.parametrize("waiting", [3, 64])
def test_text_and_examples_together_lose_no_input(waiting):
    rng = random.Random(1)
    units = units_of(lengths_like("uniform", rng, 600), whole=lambda: rng.random() < 0.5)
    rows = list(pack(units, SEQ_LEN, waiting))
    pieces = held(rows)
    assert [i for p in pieces for i in range(*p)] == [
        i for u in units for i in range(u.start, u.start + u.length)
    ]
    assert {(u.start, u.start + u.length) for u in units if u.whole} <= set(pieces)
    # Half of the units are text: with enough examples to choose from, text fills the small gaps of all rows
    # except the last ones, made from the examples still waiting.
    assert waiting < 64 or all(length_of(row) == SEQ_LEN for row in rows[: -waiting - 1])


@pytest.mark.parametrize("kind", ["uniform", "short", "long", "half"])
@pytest.mark.parametrize("seed", range(3))
def test_there_are_no_more_rows_than_with_first_fit_and_next_fit(kind, seed):
    lengths = lengths_like(kind, random.Random(seed), 1500)
    rows = len(list(pack(units_of(lengths, whole=True), SEQ_LEN, 256)))
    assert rows <= first_fit(lengths) <= next_fit(lengths)


def test_short_examples_fill_nearly_every_position():
    lengths = lengths_like("short", random.Random(3), 5000)
    rows = list(pack(units_of(lengths, whole=True), SEQ_LEN))
    assert sum(lengths) / (len(rows) * SEQ_LEN) > 0.995


def test_no_example_waits_forever():
    """The example that has waited longest always comes next."""
    waiting = 50
    units = units_of(lengths_like("uniform", random.Random(4), 2000), whole=True)
    arrival = {unit.start: i for i, unit in enumerate(units)}
    latest = 0
    for number, row in enumerate(pack(units, SEQ_LEN, waiting)):
        latest = max([latest, *(arrival[piece.start] for piece in row)])
        assert all(arrival[piece.start] >= number - waiting for piece in row)
    assert latest == len(units) - 1


def test_a_permutation_has_every_number_once_at_any_size():
    for size in [*range(1, 40), 255, 256, 257, 5000]:
        numbers = Permutation(size, "key")(torch.arange(size))
        assert numbers.sort().values.equal(torch.arange(size)), size


def test_a_permutation_depends_only_on_its_key_and_not_on_how_it_is_read():
    places = torch.arange(1000)
    one = Permutation(1000, "a")
    assert torch.equal(one(places), torch.cat([one(part) for part in places.split(7)]))
    assert torch.equal(one(places), Permutation(1000, "a")(places))
    # Two random orders of 1000 agree in one position on average.
    assert (one(places) == Permutation(1000, "b")(places)).sum() < 10


def test_a_permutation_looks_random():
    size = 4096
    numbers = Permutation(size, "key")(torch.arange(size)).double()
    places = torch.arange(size).double()
    for lag in (0, 1, 2, 64):
        other = places if lag == 0 else numbers.roll(lag)
        # The correlation of independent numbers has a standard deviation of 1 / sqrt(size): allow five.
        assert abs(torch.corrcoef(torch.stack([numbers, other]))[0, 1]) < 5 / size**0.5
    neighbours = sum(b - a == 1 for a, b in pairwise(numbers.tolist()))
    assert neighbours < 8  # one is expected


def test_a_permutation_of_2_to_the_40_needs_no_memory():
    numbers = Permutation(1 << 40, "key")(torch.arange(1000))
    assert len(set(numbers.tolist())) == 1000
    assert 0 <= int(numbers.min()) < 1 << 34
    assert 1 << 39 < int(numbers.max()) < 1 << 40
