"""Fixtures for the tests of families with audio encoders: see tests/vision/scenes.py."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from registering import search_after_imports_only

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("audio", "vision", "architectures")]

import pairs
import scenes

from liger_models.architectures import list_architectures


@pytest.fixture(params=list_architectures(audio=True))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def pairs_made() -> dict[str, pairs.Pair]:
    return {}


@pytest.fixture
def pair(family, pairs_made) -> pairs.Pair:
    """Pair of the family's tiny config, shared; a test that changes parameters makes its own."""
    pytest.importorskip("transformers")
    if family not in pairs_made:
        pairs_made[family] = scenes.make_pair(family)
    torch.manual_seed(0)
    return pairs_made[family]


@pytest.fixture
def hf(pair):
    """liger_models.hf, with its models registered in the Auto classes during the test."""
    import liger_models.hf

    search_after_imports_only()
    liger_models.hf.register("split")
    yield liger_models.hf
    liger_models.hf.unregister()


@pytest.fixture
def both(pair, hf, tmp_path):
    """transformers' own model, and ours loaded from its files."""
    theirs = copy.deepcopy(pair.reference)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hf.classes_of(pair.architecture.model_type).causal_lm.from_pretrained(tmp_path / "theirs")
    return theirs.train(), ours.train()
