"""Auxiliary losses of the router, against transformers and against the formulas."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import load_balancing_loss, router_z_loss

TOKENS, EXPERTS, TOP_K = 50, 16, 3


def test_the_load_balancing_loss_and_its_gradient_match_transformers():
    reference = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    layers = [torch.randn(TOKENS, EXPERTS, requires_grad=True) for _ in range(2)]
    for chosen in (layers[:1], layers):
        expected = reference(tuple(chosen), EXPERTS, TOP_K)
        actual = load_balancing_loss(chosen, TOP_K)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        for a, b in zip(
            torch.autograd.grad(actual, chosen), torch.autograd.grad(expected, chosen), strict=True
        ):
            # Sums over 50 tokens, in a different order.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
    assert torch.equal(load_balancing_loss(layers[0], TOP_K), load_balancing_loss(layers[:1], TOP_K))


def test_the_load_balancing_loss_of_an_even_load_is_top_k():
    rolled = torch.stack([torch.arange(4.0).roll(i) for i in range(4)])
    torch.testing.assert_close(load_balancing_loss(rolled, 2), torch.tensor(2.0))


def test_the_z_loss_is_the_mean_squared_logsumexp_with_its_gradient():
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    loss = router_z_loss(logits)
    z = logits.detach().double().exp().sum(1).log()
    torch.testing.assert_close(loss.double(), (z**2).mean(), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(loss, logits)
    expected = 2 * z[:, None] * F.softmax(logits.detach().double(), 1) / TOKENS
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-8)


def test_losses_without_any_logits_raise_a_clear_error():
    with pytest.raises(ValueError, match="found no router logits"):
        load_balancing_loss([], 2)
    with pytest.raises(ValueError, match="top_k is 5; expected 1 to 4"):
        load_balancing_loss(torch.zeros(3, 4), 5)
