"""linear_cross_entropy at the sizes of a real model, and behaviour that only a GPU shows."""

import pytest
import torch
import torch.nn.functional as F
from linear_problem import ASKED, doubled, loss_and_grads, problem

from liger_models.kernels import cross_entropy
from liger_models.kernels.losses._linear_chunks import CHUNK_BYTES
from liger_models.kernels.losses.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.gpu

LLAMA = {"device": "cuda", "hidden": 4096, "vocab": 128256, "dtype": torch.bfloat16}


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1], ids=["one chunk", "eight chunks"])
def test_it_is_as_accurate_as_eager(chunk_bytes):
    x, weight, _, labels = problem(8192, ignored=range(0, 8192, 50), **LLAMA)
    truth = loss_and_grads(
        lambda x, w, y, b: F.cross_entropy(x @ w.t(), y), *doubled(x, weight), None, labels
    )
    eager = loss_and_grads(
        lambda x, w, y, b: F.cross_entropy(F.linear(x, w).float(), y), x, weight, None, labels
    )
    ours = loss_and_grads(linear_cross_entropy, x, weight, None, labels, chunk_bytes=chunk_bytes)
    # The mean of 8,000 losses, each off by the rounding of a logit (2^-8 of it): within a thousandth.
    assert abs(ours[0] - truth[0]) <= 1e-3 * 2**-8 * truth[0]
    for a, b, true in zip(ours[1:], eager[1:], truth[1:], strict=True):
        error, eager_error = ((g.double() - true).norm() / true.norm() for g in (a, b))
        assert error <= 1.01 * eager_error, (error, eager_error)  # over 10^7 elements chance evens out


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_memory_stays_within_two_and_a_half_gigabytes(tokens):
    x, weight, _, labels = problem(tokens, ignored=(), **LLAMA)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, labels).backward()
    extra = torch.cuda.max_memory_allocated() - before - weight.grad.nbytes
    assert extra <= 2.5e9, extra


def test_requested_extras_are_correct_on_a_gpu():
    x, weight, _, labels = problem(2048, ignored=range(0, 2048, 50), **LLAMA)
    options = ASKED | {"z_loss": 1e-4, "chunk_bytes": 1}
    with torch.no_grad():
        logits = F.linear(x, weight)  # the same product, so that equal logits are equal in both
        labels[1] = logits[1].argmax()
    ours = linear_cross_entropy(x, weight, labels, **options)
    expected = cross_entropy(logits, labels, z_loss=1e-4, **ASKED)
    assert (ours.predicted_tokens == -1).sum() == 41
    # Chunks of 1,024 tokens may sum a logit in a different order, which decides between near ties.
    assert (ours.predicted_tokens == expected.predicted_tokens).float().mean() >= 0.99
    assert abs(ours.token_accuracy - expected.token_accuracy) <= 0.01
    torch.testing.assert_close(ours[:2], expected[:2], rtol=1e-3, atol=0)


def test_on_a_gpu_an_invalid_label_is_named_unless_the_caller_checked_the_labels():
    x, weight, _, labels = problem(64, ignored=(), **LLAMA)
    labels[7] = 128256
    with pytest.raises(IndexError, match="label 128256 at position 7"):
        linear_cross_entropy(x, weight, labels)
    assert linear_cross_entropy(x, weight, labels, num_valid=64).isnan()


@pytest.mark.parametrize("num_valid", [-1, 12])
def test_on_a_gpu_an_impossible_number_of_valid_labels_is_refused(num_valid):
    x, weight, _, labels = problem(device="cuda")
    with pytest.raises(ValueError, match=f"num_valid is {num_valid}; expected 0 to 11"):
        linear_cross_entropy(x, weight, labels, num_valid=num_valid)


@pytest.mark.parametrize("counted", [True, False])
def test_a_cuda_graph_replays_it(counted):
    x, weight, bias, labels = problem(3000, device="cuda", hidden=64, vocab=1000)
    options = {"num_valid": 2998 if counted else None, "chunk_bytes": 1}

    def step():
        return loss_and_grads(linear_cross_entropy, x, weight, bias, labels, **options)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    torch.testing.assert_close(captured, step())


def test_it_runs_compiled_on_a_gpu():
    x, weight, bias, labels = problem(3000, torch.bfloat16, device="cuda", hidden=64, vocab=1000)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    ours = loss_and_grads(compiled, x, weight, bias, labels)
    torch.testing.assert_close(ours, loss_and_grads(linear_cross_entropy, x, weight, bias, labels))
