"""Low-rank paths of stacked experts on a GPU: at real sizes, and without synchronising."""

import pytest
import torch
from moe_problem import operands, paths_of, run

from liger_models.kernels import ExpertPath, moe_experts
from liger_models.kernels.experts.moe_experts import moe_experts_plain


def with_two_paths(function, trained=True):
    def apply(x, weights, experts, gate_up, down, *ab):
        matrices = (gate_up, down) if trained else (gate_up.detach(), down.detach())
        paths = [[ExpertPath(*ab[:2], 2.0)], [ExpertPath(*ab[2:], 0.7)]]
        names = "gate_up_paths", "down_paths"
        return function(x, weights, experts, *matrices, **dict(zip(names, paths, strict=True)))

    return apply


def problem(tokens, hidden, inner, num_experts, top_k, rank, favourite=None):
    inputs = operands(tokens, hidden, inner, num_experts, top_k, favourite, torch.bfloat16, "cuda")
    return [
        *inputs,
        *paths_of(inputs[3], rank, dtype=torch.float32),
        *paths_of(inputs[4], rank, dtype=torch.float32),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("favourite", [None, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        (4096, 2048, 768, 128, 8, 16),
        (3001, 1024, 3584, 8, 2, 128),
        (
            4001,
            1024,
            512,
            4,
            2,
            40,
        ),  # enough rows that the weights' gradient is computed with torch's product
        (1, 2048, 768, 128, 8, 16),
        (700, 101, 77, 8, 2, 3),
    ],
)
def test_at_real_sizes_they_are_as_accurate_as_eager(sizes, favourite):
    inputs = problem(*sizes, favourite)
    upstream = torch.randn_like(inputs[0])
    fast, plain = with_two_paths(moe_experts), with_two_paths(moe_experts_plain)
    ours, again = run(fast, inputs, upstream), run(fast, inputs, upstream)
    eager = run(plain, inputs, upstream)
    truth = run(plain, [t.float() if t.is_floating_point() else t for t in inputs], upstream)
    for mine, same, theirs, exact in zip(ours, again, eager, truth, strict=True):
        assert torch.equal(mine, same)
        # The norm of n random roundings varies by 1 / sqrt(2 n): three times that, of both.
        slack = 1.1 * (1 + 3 / mine.numel() ** 0.5)
        assert (mine - exact).norm() <= slack * (theirs - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.gpu
def test_frozen_matrices_change_no_bit_of_the_other_gradients_and_nothing_waits():
    inputs = problem(3000, 1024, 512, 16, 2, 16)
    upstream = torch.randn_like(inputs[0])
    expected = run(with_two_paths(moe_experts), inputs, upstream)
    frozen = [x.detach().requires_grad_(i not in (2, 3, 4)) for i, x in enumerate(inputs)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = with_two_paths(moe_experts)(*frozen)
        y.backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected[0])
    found = [x.grad for x in frozen if x.is_floating_point()]
    assert found[2] is found[3] is None
    for mine, other in zip(found, expected[1:], strict=True):
        assert mine is None or torch.equal(mine, other)
