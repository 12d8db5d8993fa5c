"""Contract common to all operations, on a GPU and at real sizes. The rest is in test_contract.py."""

import math

import pytest
import torch
from kernel_operations import EVERYTHING, LOSSES, OPERATIONS, assert_same
from operation_runs import in_float64, make_inputs, outputs_of, run_with_gradients

from liger_models.kernels import (
    add_rms_norm,
    geglu,
    layer_norm,
    relu2,
    rms_norm,
    rotary,
    split_rotary_qkv,
    swiglu,
)
from liger_models.kernels._dispatch import ceil_div

pytestmark = pytest.mark.gpu

every_operation = pytest.mark.parametrize("op", EVERYTHING.values(), ids=EVERYTHING)


ENOUGH = 64  # number of errors for a meaningful mean


def squares_of(op, inputs) -> list[tuple[int, float, float, float]]:
    """Size of every output and gradient, and sums of squares of our errors, eager's errors and the truth."""
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    eager, eager_grads, _ = run_with_gradients(op.eager, inputs, upstream)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    found = []
    for ours, theirs, true in zip(
        (*outputs, *grads), (*eager, *eager_grads), (*truth, *true_grads), strict=True
    ):
        assert ours.dtype == theirs.dtype
        numbers = (ours.double() - true, theirs.double() - true, true)
        found.append((true.numel(), *(x.square().sum().item() for x in numbers)))
    return found


@pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "width"), [(4096, 128), (2048, 2048), (1024, 5000), (512, 16384), (64, 65600), (32, 200_000)]
)
def test_it_is_as_accurate_as_eager(op, rows, width, dtype):
    def draw():
        return squares_of(op, make_inputs(op, rows, min(width, op.widest), dtype, "cuda"))

    # The error of a gradient with a single element may be small by luck, or large if a long sum happens to be
    # near zero: such results are averaged over several draws.
    draws = [draw()]
    fewest = min(count for count, *_ in draws[0])
    draws += [draw() for _ in range(ceil_div(ENOUGH, fewest) - 1)]
    for of_one in zip(*draws, strict=True):
        count, ours, theirs, true = (sum(values) for values in zip(*of_one, strict=True))
        # Both errors are random: the logarithm of the ratio of two mean errors, over n elements each,
        # deviates by 1 / sqrt(n). In float32, two roundings are allowed where eager is off by at most one,
        # and elsewhere one more than eager's: exp(x) is exp2(x log2(e)) in kernels.
        chance = math.exp(4 / count**0.5)
        rounding = torch.finfo(torch.float32).eps / 2 * true**0.5
        more = rounding if dtype == torch.float32 else 0.0
        assert ours**0.5 <= max(chance * theirs**0.5 + more, 2 * rounding)


@every_operation
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 1), (1, 130), (33, 130)])
def test_few_rows_and_one_element_are_accurate(op, rows, width):
    inputs = make_inputs(op, rows, width, device="cuda")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # A few chained sums of at most 130 numbers; those of the norm of a one-element row nearly cancel.
    for actual, true in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        largest = max(1.0, true.abs().max().item())
        torch.testing.assert_close(actual.double(), true.double(), rtol=0, atol=4 * 130 * 2**-24 * largest)


@pytest.mark.parametrize("name", LOSSES)
def test_a_vocabulary_of_200_000(name):
    op = LOSSES[name]
    inputs = make_inputs(op, 5, 200_000, device="cuda")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # Sums of 200,000 numbers, 25 in a row and the rest in a tree, then a chain of a dozen operations.
    if name == "total_variation":
        grads = true_grads = ()  # the slope jumps where two probabilities meet, and rounding picks the side
    for actual, true in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        assert (actual - true).abs().max() <= 2 * (25 + 18 + 12) * 2**-24 * true.abs().max()


@every_operation
def test_zero_rows_launch_nothing(op):
    inputs = make_inputs(op, 0, 8, torch.bfloat16, "cuda")
    outputs, grads, _ = run_with_gradients(op.run, inputs)
    assert [output.shape for output in outputs] == [o.shape for o in outputs_of(op.eager, inputs)]
    for grad in grads:
        assert not grad.any()


@every_operation
def test_more_than_2_to_the_31_elements(op):
    width = 128
    per_row = max(x.numel() for x in make_inputs(op, 2, width)[:1]) // 2
    rows = 2**31 // per_row + 1000
    inputs = make_inputs(op, rows, width, torch.bfloat16, "cuda")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    last = 512  # the operations are row by row: the last rows must give the same results alone

    def tail(x):
        return x.detach()[-last:] if len(x) == rows else x.detach()[:, -last:]

    def has_rows(x):
        return rows in x.shape[:2]

    def tails(tensors):
        return [tail(x) if has_rows(x) else x.detach() for x in tensors]

    few = [x.requires_grad_(y.requires_grad) for x, y in zip(tails(inputs), inputs, strict=True)]
    few_outputs, few_grads, _ = run_with_gradients(op.run, few, tails(upstream))
    pairs = zip((*outputs, *grads), (*few_outputs, *few_grads), strict=True)
    by_row = [(tail(many), alone) for many, alone in pairs if has_rows(many)]
    assert by_row
    assert_same(op, *zip(*by_row, strict=True))


@every_operation
def test_a_cuda_graph_captures_forward_and_backward(op):
    inputs = make_inputs(op, 64, 256, torch.bfloat16, "cuda")
    upstream = [torch.randn_like(output) for output in outputs_of(op.run, inputs)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_with_gradients(op.run, inputs, upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_grads, _ = run_with_gradients(op.run, inputs, upstream)
    with torch.no_grad():
        for x in (*inputs, *upstream):
            x.copy_(torch.randn_like(x))
    graph.replay()
    outputs, grads, _ = run_with_gradients(op.run, inputs, upstream)
    assert_same(op, (*captured, *captured_grads), (*outputs, *grads))


def test_one_compiled_module_of_all_operations_gives_the_same_gradients():
    class Everything(torch.nn.Module):
        def forward(self, x, residual, weight, bias, cos, sin):
            y, total = add_rms_norm(x, residual, weight)
            q, k, v = split_rotary_qkv(y, cos, sin, 2, 1, 64, inplace=True)
            q, k = rotary(q, k, cos, sin, interleaved=True)
            y = torch.cat([t.flatten(1) for t in (q, k, v)], -1)
            y = layer_norm(y + total, weight, bias)
            return geglu(torch.cat([swiglu(y, total), relu2(rms_norm(y, weight, cast="gemma"))], -1))

    def operands():
        torch.manual_seed(0)
        shapes = [(300, 256), (300, 256), (256,), (256,)]
        return [torch.randn(s, device="cuda").requires_grad_() for s in shapes] + [
            torch.randn(300, 32, device="cuda") for _ in range(2)
        ]

    inputs = operands()
    (y,), grads, upstream = run_with_gradients(Everything(), inputs)
    (again,), compiled_grads, _ = run_with_gradients(
        torch.compile(Everything(), fullgraph=True), inputs, upstream
    )
    for a, b in zip((y, *grads), (again, *compiled_grads), strict=True):
        # A sum over 300 rows in two orders, and a chain of about fifty operations.
        assert (a - b).abs().max() <= 400 * torch.finfo(torch.float32).eps * a.abs().max()


@every_operation
def test_it_runs_on_a_gpu_that_is_not_the_current_one(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(op, 5, 6, device="cuda:1")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    assert torch.cuda.current_device() == 0
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    for a, b in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)
