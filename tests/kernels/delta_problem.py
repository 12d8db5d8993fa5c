"""Documents, gradients and errors, shared by the tests of the two delta rules."""

import torch

# Documents of one token, none, a whole chunk, a chunk and one token, and less than a chunk.
DOCUMENTS = [0, 1, 1, 65, 130, 150]


# A thousand lengths in random order.
LENGTHS = [(0, 1, 1, 7, 64, 65, 130, 3, 20, 33)[(nth + nth // 10) % 10] for nth in range(1000)]


def with_gradients(run, inputs, upstream=None, **options):
    """Outputs and the gradients of all inputs, and the upstream gradients."""
    outputs = run(inputs, **options)
    upstream = upstream or [torch.randn_like(output) for output in outputs]
    upstream = [given.to(output) for given, output in zip(upstream, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)], upstream


def in_float64(inputs):
    return [x.detach().double().cpu().requires_grad_() for x in inputs]


def relative(actual, truth):
    truth = truth.double()
    return ((actual.double().to(truth.device) - truth).norm() / truth.norm()).item()
