"""Short convolutions that are added to their inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels._dispatch import interpret
from liger_models.layers.recurrent.residual_conv import ResidualConvolution
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.sequences import Sequences

CHANNELS, TAPS = 6, 3


@pytest.fixture
def conv(randomised):
    torch.manual_seed(0)
    return randomised(ResidualConvolution(((2, 2), (1, 2)), TAPS, 0, 0)).double()


def by_hand(conv, x, scale):
    before = F.pad(x, (0, 0, TAPS - 1, 0))
    taps = sum(before[k : k + len(x)] * conv.weight[:, k] for k in range(TAPS))
    return scale * (x + taps)


@pytest.mark.parametrize("scaled", [False, True])
def test_documents_equal_the_formula_in_values_and_gradients(conv, scaled):
    lengths = [5, 1, 4]
    x = torch.randn(sum(lengths), CHANNELS, dtype=torch.float64, requires_grad=True)
    scale = torch.full((1,), 0.6 if scaled else 1.0, dtype=torch.float64, requires_grad=True)
    parts = conv(x, Sequences.of_lengths(lengths, x.device), scale if scaled else None)
    assert [part.shape[1:] for part in parts] == [(2, 2), (1, 2)]
    found = torch.cat([part.flatten(1) for part in parts], 1)
    expected = torch.cat([by_hand(conv, document, scale) for document in x.split(lengths)])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    cotangent, operands = torch.randn_like(found), [x, conv.weight, *([scale] if scaled else [])]
    gradients = [torch.autograd.grad(y, operands, cotangent) for y in (found, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_kernel_matches_the_plain_twin(conv):
    conv, x = conv.float(), torch.randn(11, CHANNELS)
    sequences, scale = Sequences.of_lengths([7, 4], x.device), torch.tensor([1.7])
    expected = conv(x, sequences, scale)
    with interpret():
        found = conv(x, sequences, scale)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


def test_a_cache_gives_what_a_full_pass_gives(conv):
    x, scale = torch.randn(8, CHANNELS, dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
    expected = conv(x, Sequences.of_lengths([8], x.device), scale)
    cache = KVCache([()], 1, x.device, [conv.new_cache(1, x.device, x.dtype)])
    found = []
    for start, end in ((0, 1), (1, 5), (5, 6), (6, 8)):
        cache.reserve(torch.tensor([end - start]), end - start)
        step = Sequences.from_call((1, end - start), x.device)
        step.cache = cache
        found.append(conv(x[start:end], step, scale))
    for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)
