"""A batch for the tests of activation memory, and a model's results for it without recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from level_runs import run


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (2, 11), generator=generator)
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def runs_at_all() -> dict[tuple[Any, ...], dict[str, torch.Tensor]]:
    return {}


@pytest.fixture
def at_all(runs_at_all, request):
    """Function that runs a model at the level `all`, once for all levels that a test compares with it.

    Further arguments are the parameters of the test, without the levels.
    """

    def find(model, batch, *parameters):
        key = request.function.__name__, *parameters
        if key not in runs_at_all:
            runs_at_all[key] = run(model, batch)
        return runs_at_all[key]

    return find
