"""The table of cases that always run names tests and cases that exist, and no test has too many of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from night import ALWAYS, UNKNOWN
from night.in_turn import IN_TURN, SAMPLED, values_in_turn


def test_every_case_that_always_runs_exists(request):
    """Of the files that this run collects."""
    unknown = request.config.stash.get(UNKNOWN, {})
    assert {test: cases for test, cases in unknown.items() if cases} == {}


def test_every_test_of_the_table_exists():
    def exists(test):
        path, _, name = test.partition("::")
        return f"def {name.split('::')[-1]}(" in (Path(__file__).parents[1] / path).read_text()

    assert [test for test in (*ALWAYS, *IN_TURN, *SAMPLED) if not exists(test)] == []


def test_every_value_taken_in_turn_is_taken(request):
    """Of the files that this run collects."""
    if request.config.getoption("keyword"):
        pytest.skip("-k leaves out cases")
    taken: dict[str, set[tuple[int, ...]]] = {}
    for item in request.session.items:
        if (values := values_in_turn(item)) is not None:
            taken.setdefault(item.nodeid.partition("[")[0], set()).add(values)
    assert {test: found for test, found in taken.items() if len(found) == 1} == {}


MOST = 250  # cases of a test: one for each family, and for each published config


def test_no_test_always_has_more_cases_than_there_are_families(request):
    """Of the files that this run collects."""
    if request.config.getoption("--all-families"):
        pytest.skip("at night all cases run")
    every_item = (item for item in request.session.items if not item.get_closest_marker("gpu"))
    counts = Counter(item.nodeid.partition("[")[0] for item in every_item)
    too_many = {test: n for test, n in counts.items() if n > MOST}
    assert not too_many, (
        f"{too_many} cases run in every `make test`, at most {MOST} should: mark those of families with "
        "`of_layers` (tests/architectures/representatives.py), or name the cases that always run in "
        "tests/night/"
    )
