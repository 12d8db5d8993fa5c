"""softmax: tests beyond the contract common to all operations (test_contract.py)."""

import importlib
import math

import pytest
import torch

from liger_models.kernels import softmax

module = importlib.import_module("liger_models.kernels.activations.softmax")


def outputs_and_grad(function, x, dim=-1):
    y = function(x, dim)
    upstream = torch.linspace(-1.0, 2.0, y.numel(), device=x.device).to(y.dtype).view(y.shape)
    return y, torch.autograd.grad(y, x, upstream)[0]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_over_any_dimension_matches_torch(implementation, dim):
    x = torch.randn(3, 4, 5, requires_grad=True)
    torch.testing.assert_close(outputs_and_grad(softmax, x, dim), outputs_and_grad(torch.softmax, x, dim))


@pytest.mark.parametrize("widest_whole", [16, 64], ids=["in several tiles", "in one"])
def test_wide_rows_and_infinite_elements(implementation, monkeypatch, widest_whole):
    monkeypatch.setattr(module, "_WIDEST_WHOLE", widest_whole)
    monkeypatch.setattr(module, "_LEAST_ELEMENTS", 2 * widest_whole)  # two rows per program
    for tile in ("_FORWARD_TILE", "_BACKWARD_TILE"):
        monkeypatch.setattr(module, tile, (8, 2))  # two tiles and a part of one
    x = torch.randn(5, 37)
    x[0, :20] = -math.inf  # the whole first tile
    x[1, 20:] = -math.inf
    x[2, 7] = 1e30  # far beyond exp's range
    x[3] = torch.finfo(x.dtype).min  # a common mask value; times log2(e) it is -inf
    x.requires_grad_()
    torch.testing.assert_close(outputs_and_grad(softmax, x), outputs_and_grad(torch.softmax, x))
    assert softmax(torch.full((1, 37), -math.inf)).isnan().all()


def test_a_missing_dimension_and_integers_are_refused(implementation):
    with pytest.raises(IndexError, match="out of range"):
        softmax(torch.randn(3, 4), 2)
    with pytest.raises(TypeError, match="floating point"):
        softmax(torch.ones(3, dtype=torch.long))


@pytest.mark.gpu
def test_a_row_may_be_as_wide_as_a_vocabulary():
    x = torch.randn(128, 128256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ours, eager = outputs_and_grad(softmax, x), outputs_and_grad(torch.softmax, x)
    truth = outputs_and_grad(torch.softmax, x.detach().double().requires_grad_())
    for a, b, true in zip(ours, eager, truth, strict=True):
        error, eager_error = ((t.double() - true).norm() for t in (a, b))
        assert error <= 1.01 * eager_error


def test_a_tensor_without_dimensions_is_refused(implementation):
    for dim in (0, -1):
        with pytest.raises(IndexError, match="no dimensions"):
            softmax(torch.tensor(1.0), dim)
