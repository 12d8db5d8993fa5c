"""xielu: tests beyond the contract common to all operations (test_contract.py)."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import xielu

NUMBERS = torch.tensor([0.3]), torch.tensor([-0.4])


def truth(x, alpha_p, alpha_n, beta, eps):
    """The formula in float64, with the gradients of x and of both slopes."""
    x, alpha_p, alpha_n = (t.detach().double().requires_grad_() for t in (x, alpha_p, alpha_n))
    below = (beta + F.softplus(alpha_n)) * (torch.expm1(x.clamp(max=eps)) - x)
    y = torch.where(x > 0, F.softplus(alpha_p) * x**2, below) + beta * x
    return y, *torch.autograd.grad(y, (x, alpha_p, alpha_n), torch.ones_like(y))


@pytest.mark.parametrize("eps", [-1e-6, -0.25])
def test_precision_holds_near_zero_and_at_large_negative_inputs(implementation, eps):
    """Inputs cover ranges where expm1(x) - x cancels and where exp(x) vanishes, and span several programs."""
    magnitudes = torch.logspace(-7, 2, 1500)
    x = torch.cat([-magnitudes, magnitudes, torch.zeros(1)]).requires_grad_()
    alpha_p, alpha_n = (number.clone().requires_grad_() for number in NUMBERS)
    y = xielu(x, alpha_p, alpha_n, torch.tensor(0.5), torch.tensor(eps))
    found = y, *torch.autograd.grad(y, (x, alpha_p, alpha_n), torch.ones_like(y))
    expected = truth(x, alpha_p, alpha_n, 0.5, eps)
    # About ten roundings of 6e-8 each, relative to the terms: y and its slope are near zero where these
    # cancel.
    sizes = x.abs(), torch.ones(1), torch.zeros(1), torch.zeros(1)
    for ours, right, size in zip(found, expected, sizes, strict=True):
        assert ((ours - right).abs() <= 1e-6 * (right.abs() + size)).all()


def test_parameters_with_several_elements_are_refused(implementation):
    two = torch.zeros(2)
    with pytest.raises(ValueError, match=r"alpha_n must be a single number, found a tensor \(2,\)"):
        xielu(torch.randn(3), two[:1], two, torch.tensor(0.5), torch.tensor(-1e-6))
