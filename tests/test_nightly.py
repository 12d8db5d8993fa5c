"""The table of cases that always run names tests and cases that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from nightly import ALWAYS, UNKNOWN


def test_every_case_that_always_runs_exists(request):
    """Of the files that this run collects."""
    unknown = request.config.stash.get(UNKNOWN, {})
    assert {test: cases for test, cases in unknown.items() if cases} == {}


@pytest.mark.parametrize("test", ALWAYS)
def test_every_test_of_the_table_exists(test):
    path, _, name = test.partition("::")
    source = (Path(__file__).parents[1] / path).read_text()
    assert f"def {name.split('::')[-1]}(" in source
