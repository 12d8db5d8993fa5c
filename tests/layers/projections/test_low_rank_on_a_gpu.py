"""Low-rank paths on a GPU: their products are cuBLAS's, and dropout is drawn from CUDA's random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_models.layers.projections.low_rank import low_rank_linear, plain_low_rank_linear
from liger_models.layers.projections.low_rank_autograd import _kept_elements
from liger_models.layers.projections.low_rank_plan import Adapter, Projection

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, OUTS = 1500, 512, (512, 128, 128)


def parameter(*shape, dtype=torch.float32, requires_grad=True):
    return nn.Parameter((torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).to(dtype), requires_grad)


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def adapter(out, dtype, dropout=0.0, scale=2.0):
    return Adapter(parameter(16, WIDTH, dtype=dtype), parameter(out, 16, dtype=dtype), scale, dropout)


def make(dtype, dropout):
    """Query, key and value below one another, with a float32 path each and a second one of the query's."""
    weights = parameter(sum(OUTS), WIDTH, dtype=torch.bfloat16, requires_grad=False).detach().split(OUTS)
    paths = [(adapter(out, dtype, dropout),) for out in OUTS]
    paths[0] += (adapter(OUTS[0], dtype, scale=-0.5),)
    return [Projection(nn.Parameter(w, False), None, own) for w, own in zip(weights, paths, strict=True)]


def in_float64(projections):
    def wide(x):
        return nn.Parameter(x.detach().double(), x.requires_grad)

    return [
        Projection(wide(p.weight), None, tuple(a._replace(a=wide(a.a), b=wide(a.b)) for a in p.adapters))
        for p in projections
    ]


def results(function, x, projections, dy):
    x = x.detach().requires_grad_()
    y = function(x, *projections)
    trained = [x, *(matrix for p in projections for a in p.adapters for matrix in (a.a, a.b))]
    return [y, *torch.autograd.grad(y, trained, dy.to(y.dtype))]


def plain(x, *projections):
    return torch.cat([plain_low_rank_linear(x, projection, x.dtype) for projection in projections], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_accurate_as_the_plain_form(dtype):
    torch.manual_seed(0)
    projections = make(dtype, 0.0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(TOKENS, sum(OUTS), device="cuda", dtype=torch.bfloat16)
    truth = results(plain, x.double(), in_float64(projections), dy)
    ours = results(low_rank_linear, x, projections, dy)
    theirs = results(plain, x, projections, dy)
    for found, reference, expected in zip(ours, theirs, truth, strict=True):
        assert distance(found, expected) <= 1.1 * distance(reference, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_leaves_out_the_same_elements_in_both_passes(dtype):
    torch.manual_seed(0)
    (projection,) = make(dtype, 0.3)[1:2]
    (path,) = projection.adapters
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, OUTS[1], device="cuda", dtype=torch.bfloat16)
    state = torch.cuda.get_rng_state()
    y = low_rank_linear(x, projection)
    torch.randn(999, device="cuda")  # other code draws numbers before the backward pass
    found = [y, *torch.autograd.grad(y, [x, path.a, path.b], dy)]

    kept = _kept_elements(x, 0.3, state)
    left_out = 1 - kept.float().mean().item()
    assert abs(left_out - 0.3) <= 5 * (0.3 * 0.7 / kept.numel()) ** 0.5  # five standard deviations
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, path.a, path.b)]
    t = F.linear(wide[0] * kept / 0.7, wide[1])
    truth = F.linear(wide[0], projection.weight.double()) + path.scale * F.linear(t, wide[2])
    expected = [truth, *torch.autograd.grad(truth, wide, dy.double())]
    for one, other in zip(found, expected, strict=True):
        # x, t, u and the outputs are rounded to bfloat16 (by 2^-9 each, about 2^-9.5 for normal numbers);
        # with another mask the distance would be about one.
        assert distance(one, other) <= 4 * 2**-9
