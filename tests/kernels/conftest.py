"""Fixtures of the kernel tests."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for kernel_operations, which programs in this folder import too


@pytest.fixture(params=["plain", "triton"])
def implementation(request):
    """Run a CPU test twice: through the plain twins, and through the kernels in Triton's interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def assert_near():
    """assert_near(actual, truth, roundings): no element is off by more than so many roundings of the largest.

    A rounding is half an ulp of actual's dtype, at the size of the largest element of `truth`.
    """

    def check(actual, truth, roundings):
        assert actual.shape == truth.shape
        if truth.numel():
            unit = torch.finfo(actual.dtype).eps / 2 * max(truth.abs().max().item(), 1e-30)
            error = (actual.double() - truth.double()).abs().max().item()
            assert error <= roundings * unit, f"{error / unit:.1f} roundings, allowed {roundings}"

    return check
