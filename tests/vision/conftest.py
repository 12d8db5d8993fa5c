"""Fixtures of the tests of all families that see images: see scenes.py, and tests/architectures/pairs.py."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "architectures")]

import pairs
import scenes

from liger_models.architectures import list_architectures


@pytest.fixture(params=list_architectures(vision=True))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_pair():
    """A factory: the family's tiny config, with changes of its parts, as a native model and its reference."""
    pytest.importorskip("transformers")
    return scenes.make_pair


@pytest.fixture(scope="session")
def pairs_made() -> dict[str, pairs.Pair]:
    return {}


@pytest.fixture
def pair(family, make_pair, pairs_made) -> pairs.Pair:
    """The family's tiny config, made once; a test that changes parameters makes its own."""
    if family not in pairs_made:
        pairs_made[family] = make_pair(family)
    torch.manual_seed(0)
    return pairs_made[family]


@pytest.fixture
def projections() -> str:
    """Pairs of the models that `hf` registers; a test file may define its own."""
    return "fused"


@pytest.fixture
def hf(request, projections):
    """liger_models.hf, whose models the Auto classes give until the test is over."""
    import liger_models.hf

    if "pair" in request.fixturenames:  # whose reference is transformers' own, with all of its parts
        request.getfixturevalue("pair")
    liger_models.hf.register(projections)
    yield liger_models.hf
    liger_models.hf.unregister()


@pytest.fixture
def both(pair, hf, tmp_path):
    """transformers' own model, and ours that was read from its files."""
    import transformers

    theirs = copy.deepcopy(pair.reference)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "theirs")
    return theirs.train(), ours.train()
