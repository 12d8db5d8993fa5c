"""Fixtures for the benchmarks, which are at the top of the repository and not installed.

Their processes are forks unless a test needs a new program: importing torch and transformers would take most
of the time.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import Fork, fork_server

ROOT = Path(__file__).parents[2]
COMMAND = """
import runpy, sys
sys.path.insert(0, {root!r})
runpy.run_module("benchmarks", run_name="__main__")
"""


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The package, with its modules imported."""
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.__main__
    import benchmarks.bound
    import benchmarks.measure
    import benchmarks.operations.core
    import benchmarks.picture
    import benchmarks.tables

    torch.manual_seed(0)
    return benchmarks


@pytest.fixture
def build(benchmarks):
    """build(name, shape, dtype) returns the case of an operation on the CPU."""

    def build(name, shape, dtype=torch.bfloat16):
        return benchmarks.operations.REGISTRY[name].build(shape, dtype, torch.device("cpu"))

    return build


@pytest.fixture
def check(benchmarks):
    """check(case, provider, dtype) returns (error, whether operands are overwritten), or raises Wrong."""

    def check(case, provider, dtype=torch.bfloat16):
        bound = benchmarks.bound.Bound(case, provider)
        return benchmarks.bound.check(bound.results(), case.truth(), dtype), bound.altered()

    return check


@pytest.fixture
def forked_command(tmp_path):
    """Stands in for the module `subprocess`: runs `python -m benchmarks ...` in a fork."""

    def run(command, env=None, **_):
        assert command[:3] == [sys.executable, "-m", "benchmarks"]
        code = COMMAND.format(root=str(ROOT))
        fork = Fork("code", code, *command[3:], output=tmp_path / "output", environment=env)
        return subprocess.CompletedProcess(command, fork.wait(300))

    return SimpleNamespace(run=run, DEVNULL=None)


@pytest.fixture
def forked_ranks(tmp_path):
    """Stands in for `benchmarks.ranks.started`: the ranks are forks, and have ended."""

    @contextlib.contextmanager
    def started(module, task, folder, processes):
        imports = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}"
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__')"
        given = [imports, code, processes, json.dumps(task), str(folder)]
        Fork("launch", *given, output=tmp_path / "output").wait(300)
        yield []

    return started


@pytest.fixture
def forked_jobs(benchmarks, monkeypatch):
    """Jobs run in forks."""
    import benchmarks.ahead

    monkeypatch.setattr(benchmarks.ahead, "_SPAWN", fork_server())
