"""Gated activations and the squared ReLU. The contract common to all operations is in test_contract.py."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import geglu, relu2, swiglu
from liger_models.kernels.activations.gated_linear import gated_linear


@pytest.mark.parametrize("operation", [swiglu, geglu])
def test_the_gate_is_the_first_half_of_a_packed_operand(operation, implementation):
    gate, up = torch.randn(5, 6), torch.randn(5, 6)
    assert torch.equal(operation(torch.cat([gate, up], -1)), operation(gate, up))
    assert not torch.equal(operation(gate, up), operation(up, gate))


def test_swiglu_geglu_and_relu2_match_torch(implementation, assert_near):
    gate, up = torch.randn(5, 6) * 3, torch.randn(5, 6)
    gate64, up64 = gate.double(), up.double()
    assert_near(swiglu(gate, up), F.silu(gate64) * up64, 12)
    assert_near(geglu(gate, up), F.gelu(gate64, approximate="tanh") * up64, 12)
    assert_near(geglu(gate, up, approximate="none"), F.gelu(gate64) * up64, 12)
    assert_near(relu2(gate), F.relu(gate64) ** 2, 2)
    # The two forms of GELU differ by up to 5e-4, enough to notice if one were used for the other.
    assert (geglu(gate, up) - geglu(gate, up, approximate="none")).abs().max() > 1e-5


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the sigmoid is then zero
@pytest.mark.parametrize("operation", [swiglu, geglu, relu2])
def test_large_inputs_saturate_and_do_not_overflow(operation, implementation):
    gate = torch.tensor([[-200.0, -1e4, 200.0, 1e4]], requires_grad=True)
    y = operation(gate) if operation is relu2 else operation(gate, torch.ones(1, 4))
    (grad,) = torch.autograd.grad(y.sum(), gate)
    large = gate.detach()[:, 2:]
    expected = large.square() if operation is relu2 else large
    assert torch.equal(y[:, :2], torch.zeros(1, 2))
    assert torch.equal(y[:, 2:], expected)
    assert torch.equal(grad[:, 2:], 2 * large if operation is relu2 else torch.ones(1, 2))


def test_nan_propagates(implementation):
    x = torch.tensor([[float("nan"), 1.0]])
    for y in (relu2(x), swiglu(x, torch.ones(1, 2)), geglu(x, torch.ones(1, 2))):
        assert y.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("operation", [swiglu, geglu, relu2])
def test_only_the_inputs_are_kept(operation, interpreted):
    x = torch.randn(3, 6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        operation(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_rows_wider_than_a_tile_are_computed_in_full(interpreted, assert_near):
    gate, up = torch.randn(2, 2, 2500).unbind()
    assert_near(swiglu(gate, up), F.silu(gate.double()) * up.double(), 12)
    assert_near(relu2(gate), F.relu(gate.double()) ** 2, 2)


def test_mismatched_operands_are_refused():
    with pytest.raises(ValueError, match="even last dimension"):
        swiglu(torch.randn(3, 7))
    with pytest.raises(ValueError, match="expected the same shape and dtype"):
        swiglu(torch.randn(3, 6), torch.randn(3, 1))
    with pytest.raises(ValueError, match="expected the same shape and dtype"):
        geglu(torch.randn(3, 6), torch.randn(3, 6).bfloat16())
    with pytest.raises(ValueError, match="approximate is 'erf'; expected 'tanh' or 'none'"):
        geglu(torch.randn(3, 6), approximate="erf")


def _reusing(retain_graph):
    """Gradient, expected gradient, and the intermediate input after and before the backward pass."""
    leaf = torch.randn(5, 12, requires_grad=True)
    gate_up = leaf * 1
    before = gate_up.detach().clone()
    y = swiglu(gate_up, reuse_input=True)
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, leaf, upstream, retain_graph=retain_graph)
    (expected,) = torch.autograd.grad(swiglu(leaf), leaf, upstream)
    return gradient, expected, gate_up, before


def test_reusing_the_input_gives_the_same_gradient(interpreted):
    gradient, expected, gate_up, before = _reusing(retain_graph=False)
    assert torch.equal(gradient, expected)
    assert not torch.equal(gate_up, before)  # its memory now holds the gradient


def test_a_retained_graph_leaves_the_input_alone(interpreted):
    gradient, expected, gate_up, before = _reusing(retain_graph=True)
    assert torch.equal(gradient, expected)
    assert torch.equal(gate_up, before)


def test_a_reused_input_cannot_be_read_by_another_backward(interpreted):
    gate_up = torch.randn(5, 12, requires_grad=True) * 1
    square = gate_up.square()
    swiglu(gate_up, reuse_input=True).sum().backward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|second time"):
        square.sum().backward()


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_a_gated_linear_layer_has_the_bits_of_its_two_operations(
    trained, keeps_graph, activation, implementation
):
    """The product is made again in the memory of its gradient, or not at all if the weight is frozen."""
    gate_up, weight, bias = torch.randn(5, 24), torch.randn(7, 12), torch.randn(7)
    if activation == "relu2":
        gate_up = gate_up[:, :12].contiguous()
    results = []
    for as_one in (True, False):
        leaf, w = gate_up.clone().requires_grad_(trained[0]), weight.clone().requires_grad_(trained[1])
        b, x = bias.clone().requires_grad_(), leaf * 1
        if as_one:
            y = gated_linear(x, w, b, activation, reuse_input=True)
        else:
            y = F.linear(relu2(x) if activation == "relu2" else swiglu(x, reuse_input=True), w, b)
        upstream = torch.linspace(-1, 2, y.numel()).view_as(y)
        y.backward(upstream, retain_graph=keeps_graph)
        if keeps_graph:
            y.backward(upstream)
        results.append([y.detach(), *(p.grad for p in (leaf, w, b))])
    for found, expected in zip(*results, strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


def test_a_gated_linear_layer_keeps_only_gate_and_up_and_its_weight(interpreted):
    gate_up, weight = torch.randn(3, 6, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_linear(gate_up, weight, None, "gelu")
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr(), weight.data_ptr()]
