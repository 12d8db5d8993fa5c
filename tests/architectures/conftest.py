"""Fixtures of the tests of all families: see pairs.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for pairs, variants and others in this folder

import pairs
from representatives import leave_layers_to, representatives

from liger_models.architectures import list_architectures


@pytest.fixture
def all_families(request) -> bool:
    """Whether every case runs for all families: see representatives.py."""
    return request.config.getoption("--all-families")


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., pairs.Pair]:
    """A factory: `make_pair("llama", {"head_dim": 24})` is the family's tiny config with changes; `ABSENT`
    removes a key.
    """
    pytest.importorskip("transformers")
    return pairs.make_pair


@pytest.fixture(scope="session")
def shared_pair() -> Callable[[str], pairs.Pair]:
    """A factory like `make_pair` for unchanged tiny configs, which makes each pair once."""
    pytest.importorskip("transformers")
    return pairs.make_pair_once()


@pytest.hookimpl(tryfirst=True)  # before night/ leaves out some of the cases of these families
def pytest_collection_modifyitems(config, items):
    leave_layers_to(representatives, config, items, Path(__file__).parent)


@pytest.fixture(params=list_architectures())
def family(request) -> str:
    return request.param


@pytest.fixture
def pair(family, shared_pair) -> pairs.Pair:
    """The family's tiny config; a test that changes parameters makes its own with `make_pair`."""
    return shared_pair(family)


@pytest.fixture(scope="session")
def failures() -> Callable[[dict[str, float]], dict[str, float]]:
    """The results of a comparison that miss the bound."""
    return pairs.beyond_bound
