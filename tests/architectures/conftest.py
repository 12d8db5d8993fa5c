"""Fixtures of the tests of all families: see pairs.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for pairs, variants and others in this folder

import pairs
from representatives import representatives

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


def pytest_collection_modifyitems(config, items):
    """Leave the tests of layers to some families, unless `--all-families` is given."""
    if config.getoption("--all-families"):
        return
    chosen = representatives()
    left_out = [
        item
        for item in items
        if item.get_closest_marker("of_layers") and item.callspec.params["family"] not in chosen
    ]
    config.hook.pytest_deselected(items=left_out)
    left_out_ids = {id(item) for item in left_out}
    items[:] = [item for item in items if id(item) not in left_out_ids]


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
