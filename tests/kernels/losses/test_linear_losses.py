"""Behaviour common to all losses of a linear layer's output, for labels and impossible tokens."""

import pytest
import torch
from product_operations import VOCAB

from liger_models.kernels import (
    linear_cosine_distillation,
    linear_cross_entropy,
    linear_jsd,
    linear_kl,
    linear_log_probs,
)
from liger_models.kernels.losses import _linear_chunks


def log_probs(x, weight, labels, **options):
    return sum(linear_log_probs(x, weight, labels, entropy=True, **options)[:2])


def weighted_sum(x, weight, labels, **options):
    coefficients = torch.tensor([0.5, 2.0, -1.5])
    return linear_log_probs(x, weight, labels, coefficients=coefficients, **options).weighted_sum


def distilled(divergence):
    def run(x, weight, labels, bias=None, **options):
        return divergence(x, weight, x.detach(), weight.detach() + 1, labels, bias, **options)

    return run


OF_LABELS = {
    "cross_entropy": linear_cross_entropy,
    "log_probs": log_probs,
    "weighted_sum": weighted_sum,
    "kl": distilled(linear_kl),
    "jsd": distilled(linear_jsd),
    "cosine": distilled(linear_cosine_distillation),
}
every_loss = pytest.mark.parametrize("loss", OF_LABELS.values(), ids=OF_LABELS)
MEANS = {name: loss for name, loss in OF_LABELS.items() if name not in ("log_probs", "weighted_sum")}
every_mean = pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)


@every_loss
@pytest.mark.parametrize("bad", [-1, VOCAB, -(2**40), 2**33])
def test_a_label_outside_the_vocabulary_is_an_error(loss, bad, implementation):
    labels = torch.tensor([3, bad, -100])
    with pytest.raises(IndexError, match=rf"{bad}\b"):
        loss(torch.randn(3, 6), torch.randn(VOCAB, 6), labels)


@pytest.mark.gpu
@every_loss
def test_on_a_gpu_a_label_outside_the_vocabulary_is_named_too(loss):
    labels = torch.tensor([3, VOCAB, -100], device="cuda")
    with pytest.raises(IndexError, match=rf"{VOCAB}\b"):
        loss(torch.randn(3, 6, device="cuda"), torch.randn(VOCAB, 6, device="cuda"), labels)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_with_all_labels_ignored_every_gradient_is_zero(loss, dtype, implementation):
    x = torch.randn(3, 6).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, 6).to(dtype).requires_grad_()
    loss(x, weight, torch.full((3,), -100)).sum().backward()
    assert not x.grad.any()
    assert not weight.grad.any()


@every_mean
def test_a_divisor_of_zero_shows_in_float16_as_in_float32(loss, implementation):
    def gradient(dtype):
        x, weight = torch.randn(3, 6).to(dtype).requires_grad_(), torch.randn(VOCAB, 6).to(dtype)
        return torch.autograd.grad(loss(x, weight, torch.tensor([3, -100, 5]), num_items=0), x)[0]

    for dtype in (torch.float16, torch.float32):
        assert not gradient(dtype)[0].isfinite().any()


def test_an_upstream_gradient_reaches_every_block_of_the_gradients(interpreted, monkeypatch):
    monkeypatch.setattr(_linear_chunks, "_SCALE_BLOCK", 8)
    monkeypatch.setattr(_linear_chunks, "_SCALE_BLOCKS", 2)  # several programs with several blocks each
    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(VOCAB, 6, requires_grad=True)
    labels = torch.arange(5)
    plain = torch.autograd.grad(linear_cross_entropy(x, weight, labels), [x, weight])
    scaled = torch.autograd.grad(4 * linear_cross_entropy(x, weight, labels), [x, weight])
    assert all(torch.equal(4 * a, b) for a, b in zip(plain, scaled, strict=True))


# A row of logits that contains an infinity has no direction, and so no cosine.
@pytest.mark.parametrize("name", [name for name in OF_LABELS if name != "cosine"])
def test_a_bias_of_minus_infinity_excludes_a_token(name, implementation):
    loss = OF_LABELS[name]
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(VOCAB, 6, requires_grad=True)
    labels, bias = torch.tensor([3, -100, 9]), torch.zeros(VOCAB)
    bias[20:] = float("-inf")
    if name in ("kl", "jsd"):
        options = {"teacher_bias": bias}
    else:
        options = {}
    value = loss(x, weight, labels, bias=bias, **options)
    without = loss(x, weight[:20], labels)
    torch.testing.assert_close(value, without)
    grads = [torch.autograd.grad(result.sum(), (x, weight)) for result in (value, without)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
