"""attention at real sizes, on a GPU. Everything else is in test_flash_attention.py."""

import itertools

import pytest
import torch
from attention_forms import attend, eager_attention, operands
from operation_runs import in_float64, run_with_gradients

from liger_models.kernels import attention, document_bounds, key_ranges, marked_spans
from liger_models.kernels.attention.flash_attention import attention_plain

pytestmark = pytest.mark.gpu


def documents(tokens, longest):
    """Boundaries of random documents, one of them empty."""
    lengths = [0]
    while sum(lengths) < tokens:
        lengths.append(int(torch.randint(1, longest, ())))
    bounds = torch.tensor([0, *lengths]).cumsum(0).clamp(max=tokens)
    return tuple(bounds.tolist())


GPU_CASES = {
    "causal": {},
    "window": {"window": 300},
    "softcap": {"softcap": 5.0},
    "packed": {"cu_seqlens": "random"},
    "slopes": {"slopes": (0.0625, 0.25, 0.5, 0.01)},
    "all": {
        **{"cu_seqlens": "random", "window": 100, "softcap": 5.0, "scale": 0.2},
        "slopes": (0.0625, 0.25, 0.5, 0.01),
    },
}


def gpu_case(options, tokens):
    if "cu_seqlens" in options:
        options = {**options, "cu_seqlens": torch.tensor(documents(tokens, 400), device="cuda")}
    if "slopes" in options:
        options = {**options, "slopes": torch.tensor(options["slopes"], device="cuda")}
    return options


# Tiles depend on head size and dtype, the code around them on the options.
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GPU_SHAPES = [
    *((dim, BF16, 2, "all") for dim in (16, 64, 80, 96, 128, 192, 256, 320, 512)),
    *((dim, dtype, 2, "all") for dim in (64, 96, 256, 512) for dtype in (F16, F32)),
    *(((192, 128), dtype, 4, name) for dtype in (BF16, F32) for name in ("causal", "all")),
    *((dims, BF16, 2, "all") for dims in ((96, 64), (48, 128), (72, 64), (192, 256), (256, 128))),
    *((dim, BF16, kv_heads, name) for dim, kv_heads in ((64, 1), (128, 4)) for name in list(GPU_CASES)[:-1]),
]


@pytest.mark.parametrize(("dim", "dtype", "kv_heads", "name"), GPU_SHAPES)
def test_at_real_sizes_it_is_as_accurate_as_eager(dim, dtype, kv_heads, name):
    tokens = 1111
    options = gpu_case(GPU_CASES[name], tokens)
    dim, value_dim = dim if isinstance(dim, tuple) else (dim, dim)
    inputs = operands(tokens, 4, kv_heads, dim, True, dtype, "cuda", value_dim)

    def run(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, **options)

    def eager(q, k, v, sinks):
        return eager_attention(q, k, v, sinks=sinks, **options)

    found, grads, upstream = run_with_gradients(run, inputs)
    again, grads_again, _ = run_with_gradients(run, inputs, upstream)
    rounded, rounded_grads, _ = run_with_gradients(eager, inputs, upstream)
    truth, true_grads, _ = run_with_gradients(run, in_float64(inputs), in_float64(upstream))
    results = zip(
        (*found, *grads),
        (*again, *grads_again),
        (*rounded, *rounded_grads),
        (*truth, *true_grads),
        strict=True,
    )
    for ours, same, theirs, true in results:
        assert torch.equal(ours, same)
        # In float32, where eager is off by little more than one rounding, a few roundings are allowed.
        few = 4 * torch.finfo(torch.float32).eps * true.norm()
        # The gradient of the sinks has only four elements: the ratio of two such errors is mostly chance.
        chance = 4.0 if true.numel() < 100 else 1.1
        assert (ours - true).norm() <= chance * (theirs - true).norm() + few


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_marked_tokens_are_as_accurate(dtype):
    """Images of about 150 tokens, with text between them, in documents; compare with the plain twin."""
    tokens = 1111
    cu_seqlens = torch.tensor((0, 700, 703, tokens), device="cuda")
    bounds = document_bounds(cu_seqlens, tokens)
    marked = (torch.arange(tokens, device="cuda") % 190 < 150).int()
    ranges = key_ranges(bounds, marked_spans(bounds, marked), marked=marked)
    inputs = operands(tokens, 4, 2, 128, False, dtype, "cuda")

    def run(q, k, v):
        return attention(q, k, v, bounds=ranges)

    def plain(q, k, v):
        return attention_plain(q, k, v, q.shape[2] ** -0.5, ranges)

    found, grads, upstream = run_with_gradients(run, inputs)
    rounded, rounded_grads, _ = run_with_gradients(plain, inputs, upstream)
    truth, true_grads, _ = run_with_gradients(plain, in_float64(inputs), in_float64(upstream))
    results = zip((*found, *grads), (*rounded, *rounded_grads), (*truth, *true_grads), strict=True)
    for ours, theirs, true in results:
        few = 4 * torch.finfo(torch.float32).eps * true.norm()
        assert (ours - true).norm() <= 1.1 * (theirs - true).norm() + few


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(32, 8, 128, 128), (8, 4, 256, 256), (64, 8, 64, 64), (16, 16, 192, 128), (8, 2, 512, 512)],
)
def test_thousands_of_tokens_are_as_accurate(heads, kv_heads, dim, value_dim):
    inputs = operands(8192, heads, kv_heads, dim, False, torch.bfloat16, "cuda", value_dim)
    options = gpu_case({"cu_seqlens": "random", "softcap": 50.0}, 8192)
    found, grads, upstream = run_with_gradients(lambda q, k, v: attention(q, k, v, **options), inputs)
    ends = options["cu_seqlens"].tolist()

    def alone(start, end):
        few = [x.detach()[start:end].double().requires_grad_() for x in inputs]
        return run_with_gradients(
            lambda q, k, v: attention(q, k, v, softcap=50.0), few, [upstream[0][start:end].double()]
        )

    for start, end in [(a, b) for a, b in itertools.pairwise(ends) if b > a][:: len(ends) // 5]:
        truth, true_grads, _ = alone(start, end)
        for ours, true in zip((*found, *grads), (*truth, *true_grads), strict=True):
            # bfloat16 has 8 bits of precision: weights, their gradients and the result are rounded to it.
            assert (ours[start:end] - true).norm() <= 4 * 2**-8 * true.norm()


def test_more_than_2_to_the_31_elements():
    tokens, last = 2**20 + 1024, 1024
    inputs = operands(tokens, 16, 1, 128, False, torch.bfloat16, "cuda")

    def run(q, k, v):
        return attention(q, k, v, window=128)

    found, grads, upstream = run_with_gradients(run, inputs)
    few = [x.detach()[-last:].clone().requires_grad_() for x in inputs]
    expected, expected_grads, _ = run_with_gradients(run, few, [upstream[0][-last:]])
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        # In the short run, the window of the first 128 of these tokens is cut off.
        torch.testing.assert_close(a[-last + 128 :], b[128:], rtol=2**-7, atol=2**-7)


def test_neither_pass_waits_for_the_gpu():
    inputs = operands(700, sinks=True, dtype=torch.bfloat16, device="cuda", dim=64)
    cu_seqlens = torch.tensor([0, 300, 700], device="cuda")

    def run(q, k, v, sinks):
        return attention(q, k, v, cu_seqlens=cu_seqlens, window=99, softcap=9.0, sinks=sinks)

    upstream = run_with_gradients(run, inputs)[2]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_with_gradients(run, inputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scores_are_never_stored():
    inputs = operands(16384, 8, 2, 64, False, torch.bfloat16, "cuda")
    upstream = run_with_gradients(attention, inputs)[2]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_with_gradients(attention, inputs, upstream)
    # out, dq and the copies that autograd makes; dk, dv; lse and delta.
    assert torch.cuda.max_memory_allocated() - before <= 8 * inputs[0].nbytes


def test_it_runs_on_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = operands(100, sinks=True, device="cuda:1")
    found, grads, upstream = run_with_gradients(attend({"cu_seqlens": (0, 40, 100)}), inputs)
    assert torch.cuda.current_device() == 0
    truth, true_grads, _ = run_with_gradients(
        attend({"cu_seqlens": (0, 40, 100)}), in_float64(inputs), in_float64(upstream)
    )
    for a, b in zip((*found, *grads), (*truth, *true_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
