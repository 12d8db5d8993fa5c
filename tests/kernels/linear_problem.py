"""Operands of a linear layer with labels, and the loss and gradients of its output."""

import torch

H, V = 8, 37
ASKED = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def problem(tokens=11, dtype=torch.float32, ignored=(1, 5), device="cpu", hidden=H, vocab=V):
    """x, weight and bias that require gradients, and labels, some of them ignored."""
    x = torch.randn(tokens, hidden, device=device)
    weight = torch.randn(vocab, hidden, device=device) * (2 * hidden**-0.5)
    bias = torch.randn(vocab, device=device)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels[list(ignored)] = -100
    return *(t.to(dtype).requires_grad_() for t in (x, weight, bias)), labels


def doubled(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def loss_and_grads(function, x, weight, bias, labels, **options):
    loss = function(x, weight, labels, bias, **options)
    upstream = torch.linspace(0.5, 2.0, loss.numel(), device=x.device).to(loss.dtype).reshape(loss.shape)
    return loss, *torch.autograd.grad(loss, [t for t in (x, weight, bias) if t is not None], upstream)
