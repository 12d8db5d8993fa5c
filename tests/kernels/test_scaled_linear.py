"""A linear layer times a number: one product each for the output and the gradients."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels.activations.gated_linear import gated_linear
from liger_models.kernels.scaled_linear import scaled_linear

SCALE = 0.25  # a power of two: rounding before or after it gives the same bits


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_output_and_gradients_are_multiplied(trained, implementation):
    x, weight, upstream = torch.randn(6, 5), torch.randn(4, 5), torch.randn(6, 4)
    results = []
    for as_one in (True, False):
        leaf, w = x.clone().requires_grad_(trained[0]), weight.clone().requires_grad_(trained[1])
        y = scaled_linear(leaf, w, SCALE) if as_one else F.linear(leaf, w) * SCALE
        y.backward(upstream)
        results.append((y.detach(), leaf.grad, w.grad))
    for found, expected in zip(*results, strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_so_are_those_of_a_gated_linear_layer(activation, implementation):
    gate_up, weight, upstream = torch.randn(5, 24), torch.randn(7, 12), torch.randn(5, 7)
    if activation == "relu2":
        gate_up = gate_up[:, :12].contiguous()
    results = []
    for scale in (SCALE, 1.0):
        x, w = gate_up.clone().requires_grad_(), weight.clone().requires_grad_()
        y = gated_linear(x, w, None, activation, scale=scale)
        y.backward(upstream)
        results.append([value * SCALE / scale for value in (y.detach(), x.grad, w.grad)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_scaled_layer_with_a_bias_is_refused():
    with pytest.raises(ValueError, match="there is a bias"):
        gated_linear(torch.randn(2, 6), torch.randn(4, 3), torch.randn(4), "silu", scale=0.5)


def test_a_product_is_rounded_once(interpreted):
    """1 + 2^-8 is no number of bfloat16, but 1.5 times that rounds to another one than 1.5 times 1."""
    x = torch.tensor([[1.0, 2.0**-8]]).bfloat16()
    weight = torch.tensor([[1.0, 1.0]]).bfloat16()
    exact = (x.double() @ weight.double().t()) * 1.5
    assert torch.equal(scaled_linear(x, weight, 1.5), exact.bfloat16())
    assert not torch.equal(F.linear(x, weight) * 1.5, exact.bfloat16())
