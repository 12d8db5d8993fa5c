"""The gradient of a table of embeddings."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import embedding


def outputs_and_grad(function, ids, weight, padding_idx, upstream):
    y = function(ids, weight, padding_idx)
    return y, torch.autograd.grad(y, weight, upstream.to(y.dtype))[0]


def ids_of(tokens, vocab, device="cpu"):
    """Ids of which one is at half of all places, and others at several in a row."""
    ids = torch.randint(vocab, (tokens,), device=device)
    ids[torch.randperm(tokens, device=device)[: tokens // 2]] = 2
    return ids


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize(("tokens", "vocab", "width"), [(1, 5, 4), (33, 3, 600), (200, 500, 20)])
def test_rows_are_summed_in_float32(tokens, vocab, width, padding_idx, implementation):
    ids, upstream = ids_of(tokens, vocab), torch.randn(tokens, width)
    weight = torch.randn(vocab, width, requires_grad=True)
    found = outputs_and_grad(embedding, ids, weight, padding_idx, upstream)
    expected = outputs_and_grad(
        F.embedding, ids, weight.detach().double().requires_grad_(), padding_idx, upstream.double()
    )
    # 100 tokens of one id: as many roundings of a sum of at most 40.
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-5)


def test_no_token_and_a_second_run(interpreted):
    weight, ids, upstream = torch.randn(50, 8, requires_grad=True), ids_of(90, 50), torch.randn(3, 30, 8)
    first, second = (outputs_and_grad(embedding, ids.view(3, 30), weight, None, upstream) for _ in range(2))
    assert torch.equal(first[1], second[1])
    y, grad = outputs_and_grad(embedding, ids[:0], weight, None, upstream[:0, 0])
    assert y.shape == (0, 8)
    assert not grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_gradient_is_rounded_once_on_a_gpu(dtype):
    ids = ids_of(5000, 3000, "cuda")
    weight = torch.randn(3000, 1030, dtype=dtype, device="cuda", requires_grad=True)
    upstream = torch.randn(5000, 1030, dtype=dtype, device="cuda")
    _, found = outputs_and_grad(embedding, ids, weight, 7, upstream)
    exact = weight.detach().double().requires_grad_()
    _, expected = outputs_and_grad(F.embedding, ids, exact, 7, upstream.double())
    # Sums of 2,500 numbers in float32, in pieces of 32: far less than this.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=1e-4)
