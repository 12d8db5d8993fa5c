"""Fixtures of the tests of all families that see images: see scenes.py, and tests/architectures/pairs.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "architectures")]

import pairs
import scenes

from liger_models.architectures import list_architectures


@pytest.fixture(params=list_architectures(sees=True))
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
