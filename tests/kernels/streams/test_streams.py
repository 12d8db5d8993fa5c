"""Weights, sums and mixtures of residual streams: the kernels and the twin, compared with the twin in
float64.
"""

import pytest
import torch

from liger_models.kernels.streams.gated_streams import (
    added_to_streams,
    added_to_streams_plain,
    gated_mean,
    gated_mean_plain,
)
from liger_models.kernels.streams.streams import mixed_streams, summed_streams, weighted_streams

TOKENS, COUNT, WIDTH, ITERATIONS = 5, 3, 20, 4


FORMS = pytest.mark.parametrize("parts", [3, 2, 1], ids=["mixed", "apart", "the head"])


def operands(parts, device="cpu", dtype=torch.float32, tokens=TOKENS, count=COUNT, width=WIDTH):
    rows = (count * (count + 2), 2 * count, count)[3 - parts]
    shapes = (tokens, count * width), (rows, count * width), (rows,), (parts,)
    found = [torch.randn(shape, device=device) for shape in shapes]
    return [found[0].to(dtype), found[1] * width**-0.5, *found[2:]]


def run(inputs, dtypes, iterations=ITERATIONS, count=COUNT):
    """The streams after a branch that doubles its input, or their sum, and all gradients."""
    leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    options = {"iterations": iterations, "eps": 1e-2, "norm_eps": 1e-3, "magnitude": 1.7}
    found = weighted_streams(*leaves, count=count, **options)
    out = found[0] if len(found) == 1 else mixed_streams(leaves[0], 2 * found[0], *found[1:])
    torch.manual_seed(1)
    upstream = torch.randn(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@FORMS
def test_sums_mixtures_and_gradients_follow_the_formula(parts, implementation, assert_near):
    inputs = operands(parts)
    found = run(inputs, [torch.float32] * 4)
    # Sums of 60 products, and iterations of which each rounds what goes into the next.
    for a, b in zip(found, run(inputs, [torch.float64] * 4), strict=True):
        assert_near(a, b, 60)


def gated(inputs, dtype, mean=gated_mean, added=added_to_streams):
    """Streams after a branch that doubles their gated mean, and all gradients."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    streams, logits, weights = leaves
    out = added(streams, 2 * mean(logits, streams, COUNT), weights)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))]


def test_gated_means_sums_and_gradients_follow_the_formula(implementation, assert_near):
    shapes = (TOKENS, COUNT * WIDTH), (TOKENS, COUNT * WIDTH), (TOKENS, COUNT)
    inputs = [torch.randn(shape) for shape in shapes]
    truth = gated(inputs, torch.float64, gated_mean_plain, added_to_streams_plain)
    # Sums of 20 products, whose terms are rounded a few times.
    for a, b in zip(gated(inputs, torch.float32), truth, strict=True):
        assert_near(a, b, 20)


@pytest.mark.gpu
@FORMS
def test_kernels_are_as_accurate_as_the_twin_in_bfloat16(parts):
    """At DeepSeek-V4's sizes, weights in float32; the twin runs on the CPU."""
    inputs = operands(parts, dtype=torch.bfloat16, tokens=64, count=4, width=4096)
    dtypes = torch.bfloat16, torch.float32, torch.float32, torch.float32
    truth = run(inputs, [torch.float64] * 4, 20, 4)
    twin = run(inputs, dtypes, 20, 4)
    found = [x.cpu() for x in run([x.cuda() for x in inputs], dtypes, 20, 4)]
    for own, bound, exact in zip(found, twin, truth, strict=True):
        far, limit = (((x.double() - exact).norm() / exact.norm()).item() for x in (own, bound))
        assert far <= 1.1 * limit


def test_sums_by_given_weights_and_a_second_branch_follow_the_formula(implementation, assert_near):
    shapes = *((TOKENS, n * WIDTH) for n in (COUNT, 1, 1)), (TOKENS, COUNT), (TOKENS, COUNT, COUNT)
    found, truth = [], []
    inputs = [torch.randn(shape) for shape in shapes]
    for results, dtype in ((found, torch.float32), (truth, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        streams, branch, also, weights, mixture = leaves
        if dtype == torch.float32:
            outs = summed_streams(streams, weights), mixed_streams(streams, branch, weights, mixture, also)
        else:
            parts, first = streams.unflatten(1, (COUNT, WIDTH)), torch.zeros(TOKENS, 1, WIDTH)
            rest = also[:, None].expand(-1, COUNT - 1, -1)
            mixed = torch.einsum("tij,tih->tjh", mixture, parts) + torch.einsum("tj,th->tjh", weights, branch)
            outs = torch.einsum("ti,tih->th", weights, parts), mixed + torch.cat([first, rest], 1)
        total = sum(out.reshape(TOKENS, -1).square().sum() for out in outs)
        results += [*outs, *torch.autograd.grad(total, leaves)]
    for a, b in zip(found, truth, strict=True):
        # As above: a gradient of a weight is a sum over WIDTH products with sums of COUNT + 2.
        assert_near(a, b.reshape(a.shape), 60)


def test_autocast_rounds_no_mixture():
    """As with the kernel: a product of torch's would round streams in float32 to bfloat16."""
    streams, branch, post = (torch.randn(TOKENS, n) for n in (COUNT * WIDTH, WIDTH, COUNT))
    mixture = torch.randn(TOKENS, COUNT, COUNT)
    expected = summed_streams(streams, post), mixed_streams(streams, branch, post, mixture)
    with torch.autocast("cpu", torch.bfloat16):
        found = summed_streams(streams, post), mixed_streams(streams, branch, post, mixture)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
