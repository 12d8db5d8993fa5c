"""Fixtures for the tests of vision-language families: see scenes.py, and tests/architectures/pairs.py."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from registering import search_after_imports_only

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "architectures")]

import pairs
import scenes
from representatives import leave_layers_to, vision_representatives

from liger_models.architectures import list_architectures


@pytest.hookimpl(tryfirst=True)  # before night/ leaves out some of the cases of these families
def pytest_collection_modifyitems(config, items):
    leave_layers_to(vision_representatives, config, items, Path(__file__).parent)


@pytest.fixture(params=list_architectures(vision=True))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_pair():
    """Factory of a native model and its reference from the family's tiny config, with changes to parts."""
    pytest.importorskip("transformers")
    return scenes.make_pair


@pytest.fixture(scope="session")
def pairs_made() -> dict[str, pairs.Pair]:
    return {}


@pytest.fixture
def pair(family, make_pair, pairs_made) -> pairs.Pair:
    """Pair of the family's tiny config, shared; a test that changes parameters makes its own."""
    if family not in pairs_made:
        pairs_made[family] = make_pair(family)
    torch.manual_seed(0)
    return pairs_made[family]


@pytest.fixture
def projections() -> str:
    """Form of projections that `hf` registers; a test file may define its own."""
    return "fused"


@pytest.fixture
def hf(request, projections):
    """liger_models.hf, with its models registered in the Auto classes during the test."""
    import liger_models.hf

    search_after_imports_only()
    if "pair" in request.fixturenames:  # its reference must be transformers' own
        request.getfixturevalue("pair")
    liger_models.hf.register(projections)
    yield liger_models.hf
    liger_models.hf.unregister()


@pytest.fixture
def both(pair, hf, tmp_path):
    """transformers' own model, and ours loaded from its files."""
    theirs = copy.deepcopy(pair.reference)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = scenes.auto_class(pair.architecture.model_type).from_pretrained(tmp_path / "theirs")
    return theirs.train(), ours.train()
