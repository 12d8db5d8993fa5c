"""attention over trees of documents at real sizes, on a GPU. Everything else is in test_tree_attention.py."""

import itertools

import pytest
import torch
from attention_forms import eager_attention, operands
from operation_runs import in_float64, run_with_gradients

from liger_models.kernels import attention, tree_ranges

pytestmark = pytest.mark.gpu

LENGTHS = (500, 130, 0, 1, 257, 3, 60, 40, 50, 200)
PARENTS = (-1, 0, 0, 0, 0, -1, -1, 6, 6, 6)
PARTS = (0, 500, 500, 333, 64, 0, 0, 60, 17, 0)  # tokens of its parent that a document continues: not all
BOUNDS = (0, *itertools.accumulate(LENGTHS))

BF16, F32 = torch.bfloat16, torch.float32
CASES = [
    (128, BF16, {}, {}),
    (64, BF16, {"window": 100}, {"softcap": 5.0}),
    ((192, 128), BF16, {"chunk": 96}, {}),
    (256, BF16, {"window": 300}, {}),
    (96, F32, {"window": 100}, {"softcap": 5.0}),
    (128, BF16, {"shared": PARTS}, {}),
    (64, BF16, {"window": 100, "shared": PARTS}, {"softcap": 5.0}),
    (96, F32, {"chunk": 96, "shared": PARTS}, {}),
]


@pytest.mark.parametrize(("dim", "dtype", "limits", "options"), CASES, ids=str)
def test_at_real_sizes_it_is_as_accurate_as_eager(dim, dtype, limits, options):
    dim, value_dim = dim if isinstance(dim, tuple) else (dim, dim)
    inputs = operands(BOUNDS[-1], 4, 2, dim, True, dtype, "cuda", value_dim)
    ranges = tree_ranges(BOUNDS, PARENTS, torch.device("cuda"), **limits)

    def run(q, k, v, sinks, function=attention):
        return function(q, k, v, sinks=sinks, bounds=ranges, **options)

    found, grads, upstream = run_with_gradients(run, inputs)
    again, grads_again, _ = run_with_gradients(run, inputs, upstream)
    rounded, rounded_grads, _ = run_with_gradients(lambda *x: run(*x, eager_attention), inputs, upstream)
    truth, true_grads, _ = run_with_gradients(run, in_float64(inputs), in_float64(upstream))
    results = (*found, *grads), (*again, *grads_again), (*rounded, *rounded_grads), (*truth, *true_grads)
    for ours, same, theirs, true in zip(*results, strict=True):
        assert torch.equal(ours, same)
        # As in test_flash_attention_on_a_gpu.py.
        few = 4 * torch.finfo(torch.float32).eps * true.norm()
        chance = 4.0 if true.numel() < 100 else 1.1
        assert (ours - true).norm() <= chance * (theirs - true).norm() + few


def test_ranges_are_made_without_waiting_for_the_gpu():
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree_ranges(BOUNDS, PARENTS, torch.device("cuda"), window=9, chunk=50, shared=PARTS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
