"""LayerNorm. The contract common to all operations is in test_contract.py."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import layer_norm


def test_an_offset_is_added_to_the_weight(implementation, assert_near):
    x, weight, bias = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    expected = F.layer_norm(x.double(), (12,), weight.double() + 1, bias.double(), 1e-3)
    assert_near(layer_norm(x, weight, bias, 1e-3, offset=1.0), expected, 12)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_weight_and_bias_may_each_be_absent(with_weight, with_bias, implementation, assert_near):
    x = torch.randn(5, 12, requires_grad=True)
    weight = torch.randn(12, requires_grad=True) if with_weight else None
    bias = torch.randn(12, requires_grad=True) if with_bias else None
    upstream = torch.randn(5, 12)
    y = layer_norm(x, weight, bias)
    needed = [t for t in (x, weight, bias) if t is not None]
    grads = torch.autograd.grad(y, needed, upstream)
    x64, weight64, bias64 = (None if t is None else t.double() for t in (x, weight, bias))
    truth = F.layer_norm(x64, (12,), weight64, bias64, 1e-5)
    assert_near(y, truth, 12)
    for a, b in zip(grads, torch.autograd.grad(truth, needed, upstream.double()), strict=True):
        assert_near(a, b.double(), 30)


def test_rows_too_wide_for_registers_are_read_in_blocks(interpreted, assert_near):
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 9_000), (9_000,), (9_000,))]
    upstream = torch.randn(2, 9_000)
    y = layer_norm(*inputs)
    x, weight, bias = (t.double() for t in inputs)
    truth = F.layer_norm(x, weight.shape, weight, bias, 1e-5)
    assert_near(y, truth, 12)
    true_grads = torch.autograd.grad(truth, inputs, upstream.double())
    for a, b in zip(torch.autograd.grad(y, inputs, upstream), true_grads, strict=True):
        assert_near(a, b.double(), 24)


def test_a_large_mean_costs_no_more_precision_than_in_torch(implementation):
    # The variance is computed after the mean is subtracted, and not as a difference of two large squares.
    x = torch.randn(5, 64) + 1000
    truth = F.layer_norm(x.double(), (64,))
    ours = (layer_norm(x, None) - truth).abs().max()
    rounding_of_the_mean = 1000 * torch.finfo(torch.float32).eps
    assert ours <= 2 * rounding_of_the_mean


def test_the_result_keeps_the_dtype_of_the_input_whatever_the_weight(implementation):
    assert layer_norm(torch.randn(3, 8).bfloat16(), torch.randn(8)).dtype == torch.bfloat16


def test_mismatched_operands_are_refused():
    x = torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"weight is \(5,\); expected \(6,\)"):
        layer_norm(x, torch.randn(5))
    with pytest.raises(ValueError, match=r"bias is \(3,\); expected \(6,\)"):
        layer_norm(x, torch.randn(6), torch.randn(3))
    with pytest.raises(ValueError, match="no weight to add it to"):
        layer_norm(x, None, offset=1.0)
