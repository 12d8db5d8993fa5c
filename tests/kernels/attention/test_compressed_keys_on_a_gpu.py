"""Attention to compressed keys on a GPU, at DeepSeek-V4's sizes of heads, compared with the twin."""

from __future__ import annotations

import pytest
import torch

from liger_models.kernels.attention.choose_compressed import choose_compressed, choose_compressed_plain
from liger_models.kernels.attention.compressed_keys import (
    compressed_attention,
    compressed_attention_plain,
    compressed_keys,
)

pytestmark = pytest.mark.gpu

PACKED, HEADS, WINDOW = (0, 3, 700, 700, 1500), 64, 128


def distances(found, expected):
    return [
        ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        for a, b in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize(
    ("rate", "top_k", "dtype", "dim"),
    [
        (4, 96, torch.bfloat16, 512),
        (128, None, torch.bfloat16, 512),
        (0, None, torch.bfloat16, 512),
        (4, 96, torch.float32, 64),
    ],
    ids=["chosen", "all", "window", "float32"],
)
def test_the_kernels_are_as_accurate_as_the_twin(rate, top_k, dtype, dim):
    """The truth is the twin in float64; the kernel is at most 1.1 times as far from it as the twin, and the
    gradient of sinks, of few elements with errors of their own, at most twice. In float32 the kernel adds the
    products of 128 queries and 64 heads one after the other, which rounds as often.
    """
    torch.manual_seed(0)
    places = compressed_keys(PACKED, rate, torch.device("cuda"))
    tokens, count = PACKED[-1], len(places.first)

    def operand(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    chosen = None
    if top_k:
        index = operand(tokens, 8, 128), operand(count, 128), torch.rand(tokens, 8, device="cuda")
        chosen = choose_compressed(*index, places, top_k, scale=0.1)
    inputs = [operand(tokens, HEADS, dim), operand(tokens, dim), operand(count, dim), operand(HEADS)]
    upstream = operand(tokens, HEADS, dim)

    def run(wide, attend=compressed_attention):
        leaves = [x.to(wide).requires_grad_() for x in inputs]
        shared = {"scale": dim**-0.5, "window": WINDOW, "chosen": chosen}
        out = attend(*leaves, places, **shared)
        kept = [x for x in leaves if len(x)]
        return out.detach(), *torch.autograd.grad(out, kept, upstream.to(wide))

    truth = run(torch.float64)
    found, bound = distances(run(dtype), truth), distances(run(dtype, compressed_attention_plain), truth)
    factors = [1.1] * (len(bound) - 1) + [2.0]
    rounding = 2**-24 * (WINDOW * HEADS) ** 0.5 if dtype == torch.float32 else 0.0
    near = [a <= max(f * b, rounding) for a, b, f in zip(found, bound, factors, strict=True)]
    assert all(near), (found, bound)


def test_the_twin_s_keys_are_chosen():
    torch.manual_seed(0)
    places = compressed_keys((0, 3, 5000, 9000), 4, torch.device("cuda"))
    # Sums of small whole numbers are exact, and many are equal.
    shapes = (9000, 16, 64), (len(places.first), 64)
    q, keys = (torch.randint(-2, 3, shape, device="cuda").bfloat16() for shape in shapes)
    weights = torch.randint(0, 3, (9000, 16), device="cuda").float()
    found = choose_compressed(q, keys, weights, places, 300, scale=1.0)
    assert torch.equal(found, choose_compressed_plain(q, keys, weights, places, 300, 1.0))


def test_memory_grows_with_the_number_of_tokens():
    """Twice the tokens, at most twice the bytes, but for the sums of shared keys and a part's bits."""
    peaks = []
    for tokens in (8192, 16384):
        places = compressed_keys((0, tokens), 4, torch.device("cuda"))
        shapes = (tokens, 64, 128), (tokens, 128), (tokens // 4, 128), (64,)
        inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
        index = [torch.randn(s, device="cuda") for s in ((tokens, 2, 32), (tokens // 4, 32), (tokens, 2))]
        chosen = choose_compressed(*index, places, 64, scale=0.1)
        del index
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = compressed_attention(*inputs, places, scale=0.1, window=128, chosen=chosen)
        out.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out, inputs, chosen
    assert peaks[1] < 2.1 * peaks[0] + (1 << 24), peaks
