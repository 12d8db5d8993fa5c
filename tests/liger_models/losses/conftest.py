import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for trl_trainers, in the same folder


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def assert_same():
    """assert_same(ours, theirs, *leaves): two losses are equal to 1e-6, and their gradients to 1e-5."""

    def check(ours, theirs, *leaves):
        # float32 rounds by 6e-8; a loss sums tens of terms, and its gradient multiplies each once more.
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
        own = torch.autograd.grad(ours, leaves, retain_graph=True)
        true = torch.autograd.grad(theirs, leaves, retain_graph=True)
        for a, b in zip(own, true, strict=True):
            assert b.any()
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())

    return check
