"""Low-rank paths of stacked experts against matrices W + scale * B A, computed in float64."""

import itertools

import pytest
import torch
from live_bytes import LiveBytes, as_on_a_gpu
from moe_problem import CLAMPED, doubled, folded, formula, operands, paths_of, run

from liger_models.kernels import ExpertPath, moe_experts
from liger_models.kernels._gpu import Gpu
from liger_models.kernels.experts import _grouped_products
from liger_models.layers.recompute.activation_memory import recompute

SCALES = (2.0, 0.7)


def with_paths(function, firsts, **given):
    """`function` of x, weights, experts, gate_up, down, the biases if `given` says so, `firsts` paths of
    gate_up (a, b, a, b, ...) and paths of down.
    """
    biases = 2 * given.pop("biases", False)

    def apply(*inputs):
        matrices, bias, ab = inputs[:5], inputs[5 : 5 + biases], inputs[5 + biases :]
        options = given | dict(zip(("gate_up_bias", "down_bias"), bias, strict=False))
        of_both = [ExpertPath(a, b, s) for a, b, s in zip(ab[::2], ab[1::2], itertools.cycle(SCALES))]
        of_both = of_both[:firsts], of_both[firsts:]
        if function is moe_experts:
            names = "gate_up_paths", "down_paths"
            return moe_experts(*matrices, **options, **dict(zip(names, of_both, strict=True)))
        gate_up, down = (folded(*pair) for pair in zip(matrices[3:], of_both, strict=True))
        return function(*matrices[:3], gate_up, down, **options)

    return apply


CASES = {
    "empty experts, one of two tiles": ({"favourite": 1, "tokens": 70, "num_experts": 3, "top_k": 1}, {}),
    "small": ({"tokens": 7, "hidden": 10, "inner": 6, "num_experts": 5, "top_k": 2}, {}),
    "of rank 16": ({"ranks": ((16,), (16,)), "tokens": 9, "num_experts": 2, "top_k": 2}, {}),
    "two paths, wider than a block": ({"ranks": ((20, 30), (3, 1)), "tokens": 9, "top_k": 2}, {}),
    "of the first product alone": ({"ranks": ((3,), ()), "tokens": 9, "top_k": 2}, {}),
    "of the last product alone": ({"ranks": ((), (3,)), "tokens": 9, "top_k": 2}, {}),
    "weighted inputs": ({"tokens": 9, "top_k": 2}, {"weighted": "inputs"}),
    "biases": ({"tokens": 9, "top_k": 2, "biases": True}, {"activation": CLAMPED}),
}


def problem(sizes):
    """Operands with paths, and the number of paths of the first product."""
    sizes = {"hidden": 33, "inner": 20, "num_experts": 4, "ranks": ((3,), (5,))} | sizes
    ranks, dtype = sizes.pop("ranks"), sizes.pop("path_dtype", None)
    inputs = operands(**sizes)
    for matrices, of_stack in zip(inputs[3:5], ranks, strict=True):
        inputs = [*inputs, *paths_of(matrices, *of_stack, dtype=dtype)]
    return inputs, len(ranks[0])


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_match_folded_matrices(case, implementation, assert_near):
    sizes, options = CASES[case]
    inputs, firsts = problem(sizes)
    options = options | {"biases": sizes.get("biases", False)}
    upstream = torch.randn_like(inputs[0])
    truth = run(with_paths(formula, firsts, **options), doubled(inputs), upstream)
    # As without paths (32), doubled: each product has two more sums before it, which are rounded.
    found = run(with_paths(moe_experts, firsts, **options), inputs, upstream)
    for actual, expected in zip(found, truth, strict=True):
        assert_near(actual, expected, 64)


@pytest.mark.parametrize("frozen", ["matrices", "all but the matrices", "all but one b"])
def test_frozen_operands_get_no_gradient_and_others_the_same(frozen, implementation):
    inputs, firsts = problem({"tokens": 9, "top_k": 2})
    upstream = torch.randn_like(inputs[0])
    expected = run(with_paths(moe_experts, firsts), inputs, upstream)[1:]
    names = ["x", "weights", "gate_up", "down", "a", "b", "a of down", "b of down"]
    trained = {
        "matrices": {*names} - {"gate_up", "down"},
        "all but the matrices": {"gate_up", "down"},
        "all but one b": {"b of down"},
    }[frozen]
    floating = [x for x in inputs if x.is_floating_point()]
    own = [x.detach().requires_grad_(name in trained) for x, name in zip(floating, names, strict=True)]
    y = with_paths(moe_experts, firsts)(*own[:2], inputs[2], *own[2:])
    y.backward(upstream)
    for x, name, gradient in zip(own, names, expected, strict=True):
        assert (x.grad is None) if name not in trained else torch.equal(x.grad, gradient), name


def test_float32_paths_of_float16_matrices_get_float32_gradients(implementation):
    inputs, firsts = problem({"tokens": 40, "top_k": 2, "dtype": torch.float16, "path_dtype": torch.float32})
    upstream = torch.randn_like(inputs[0])
    truth = run(with_paths(formula, firsts), doubled(inputs), upstream)
    found = run(with_paths(moe_experts, firsts), inputs, upstream)
    for actual, expected in zip(found, truth, strict=True):
        # At most eight roundings, of 2^-11 each, are between an operand and a result.
        assert (actual - expected).norm() <= 2**-8 * expected.norm()
    assert all(gradient.dtype == torch.float32 for gradient in found[5:])


def test_paths_of_high_rank_are_right_with_the_tiles_of_desktop_gpus(interpreted, monkeypatch):
    gpu = Gpu("sm_86", (8, 6), 99 * 1024, 2)
    blocks, descriptor = [], _grouped_products._descriptor

    def noted(x, block):
        blocks.append(block)
        return descriptor(x, block)

    monkeypatch.setattr(_grouped_products, "gpu_of", lambda x: gpu)
    monkeypatch.setattr(_grouped_products, "shared_memory", lambda x: gpu.shared_memory)
    monkeypatch.setattr(_grouped_products, "_descriptor", noted)
    sizes = {"tokens": 9, "hidden": 80, "inner": 40, "num_experts": 2, "top_k": 2, "ranks": ((70,), (65,))}
    inputs, firsts = problem(sizes | {"dtype": torch.float16})
    upstream = torch.randn_like(inputs[0])
    truth = run(with_paths(formula, firsts), doubled(inputs), upstream)
    found = run(with_paths(moe_experts, firsts), inputs, upstream)
    for actual, expected in zip(found, truth, strict=True):
        # Nine roundings at most, of 2^-11 each: the eight above, and that of a gradient.
        assert (actual - expected).norm() <= 9 * 2**-11 * expected.norm()
    of_paths = [block for block in blocks if block[:2] == [1, 32]]
    assert [1, 32, 64] in of_paths
    assert [1, 32, 128] not in of_paths


def test_recomputed_passes_over_frozen_matrices_give_the_bits_of_kept_ones_over_trained(implementation):
    """They overwrite recomputed tensors, and may still run twice. With more than 256 inputs, they sum the
    gradients of rows in slices of columns.
    """
    inputs, firsts = problem({"tokens": 9, "hidden": 300, "top_k": 2})
    upstream = torch.randn_like(inputs[0])
    of_x, of_weights, _, _, *of_paths = run(with_paths(moe_experts, firsts), inputs, upstream)[1:]
    inputs[3:5] = (matrices.detach() for matrices in inputs[3:5])
    y = recompute(with_paths(moe_experts, firsts), *inputs)
    for _ in range(2):
        trained = [x for x in inputs if x.requires_grad]
        found = torch.autograd.grad(y, trained, upstream, retain_graph=True)
        for actual, expected in zip(found, [of_x, of_weights, *of_paths], strict=True):
            assert torch.equal(actual, expected)


def test_no_tokens(implementation):
    inputs, firsts = problem({"tokens": 0, "top_k": 2})
    y, *gradients = run(with_paths(moe_experts, firsts), inputs, torch.randn_like(inputs[0]))
    assert y.shape == inputs[0].shape
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [((8, 32), (40, 8), ValueError), ((7, 33), (40, 7), ValueError), ((8, 33), (40, 12), ValueError)],
)
def test_paths_of_other_sizes_are_refused(a, b, error):
    inputs = operands(5, 33, 20, 4, 2)
    with pytest.raises(error, match=r"gate_up_paths has a path of .*expected \[4 r, 33\] and \[40, r 4\]"):
        moe_experts(*inputs, gate_up_paths=[ExpertPath(torch.zeros(a), torch.zeros(b), 1.0)])


def test_under_compile_paths_are_folded(monkeypatch, assert_near):
    inputs, firsts = problem({"tokens": 9, "top_k": 2})
    upstream = torch.randn_like(inputs[0])
    truth = run(with_paths(formula, firsts), doubled(inputs), upstream)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = run(with_paths(moe_experts, firsts), inputs, upstream)
    for actual, expected in zip(found, truth, strict=True):
        assert_near(actual, expected, 64)


def test_a_pass_takes_less_memory_than_a_stack():
    """Neither W + s B A nor a gradient of that size is made."""
    inputs, firsts = problem({"tokens": 3, "hidden": 256, "inner": 256, "num_experts": 64, "top_k": 2})
    inputs[3:5] = (matrices.detach() for matrices in inputs[3:5])
    with as_on_a_gpu(), LiveBytes(inputs, zero=True) as live:
        with_paths(moe_experts, firsts)(*inputs).sum().backward()
    assert 0 < live.peak < inputs[4].nbytes
    assert all(x.grad is not None for x in inputs if x.requires_grad)
