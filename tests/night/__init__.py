"""Cases that `make test` leaves to the nightly run, `make test FAMILIES=all`.

They show again, with another family, setting or size, what a case that stays shows of the same code. Each
entry names a test and the cases of it that always run; none means that the whole test waits for the night. In
in_turn.py an entry names a parameter whose values are taken in turn. A case that is asked for by its name
(`pytest FILE::TEST[CASE]`) always runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from night import audio, families, in_transformers, kernels, others, training, vision
from night.in_turn import out_of_turn
from night.kernels import OPTIONS, WITH_ONE_OPTION

ALWAYS = {
    test: cases
    for part in (audio, families, in_transformers, kernels, others, training, vision)
    for test, cases in part.ALWAYS.items()
}

UNKNOWN = pytest.StashKey[dict[str, set[str]]]()


def register_night(config: pytest.Config) -> None:
    """Leave out the cases that wait for the night, unless `--all-families` or a case is asked for."""
    if not config.getoption("--all-families") and not any("[" in argument for argument in config.args):
        config.pluginmanager.register(_Always())
        config.pluginmanager.register(_InTurn())


class _Always:
    @pytest.hookimpl(wrapper=True)  # before `-k`, markers and folders leave out cases
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> Any:
        """Deselect the cases that are not among those that always run. Names of cases that their test does
        not have are kept in the config for test_night.py.
        """
        found: dict[str, set[str]] = {}
        left_out = []
        for item in items:
            test, _, case = item.nodeid.partition("[")
            if test in ALWAYS:
                found.setdefault(test, set()).add(case[:-1])
                if case[:-1] not in ALWAYS[test]:
                    left_out.append(item)
            elif test in WITH_ONE_OPTION and set(OPTIONS) & set(case[:-1].split("-")):
                left_out.append(item)
        config.stash[UNKNOWN] = {test: set(ALWAYS[test]) - cases for test, cases in found.items()}
        _leave_out(left_out, config, items)
        return (yield)


class _InTurn:
    # Before `-k`, but after the conftests of folders: it chooses among the families that run by day.
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        _leave_out(out_of_turn(items), config, items)


def _leave_out(left_out: list[Any], config: pytest.Config, items: list[Any]) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        ids = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in ids]
