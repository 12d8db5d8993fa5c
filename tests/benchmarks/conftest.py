"""Fixtures for the benchmarks, which are at the top of the repository and not installed."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The package, with its modules imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
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
