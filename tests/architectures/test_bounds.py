"""The bounds of the comparisons of this folder: rounding passes, faults and inputs near a tie do not."""

from __future__ import annotations

import pytest
import torch
from pairs import Run, beyond_bound
from rounding import BOUND, LARGEST_ROUNDING, ORDERS, OtherOrder
from ties import TieError, clear_of_ties, router


def test_another_order_of_sums_changes_only_rounding():
    x, weight = torch.randn(5, 300), torch.randn(300, 7, requires_grad=True)

    def run():
        y = (x @ weight).tanh()
        return y, torch.autograd.grad(y.sum(), weight)[0]

    expected = run()
    with OtherOrder(0):
        found = run()
    for a, b in zip(found, expected, strict=True):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "rounding", "missed"),
    [
        (0.9 * BOUND, 0.0, False),
        (1.1 * BOUND, 0.2 * BOUND, True),
        (1.9 * BOUND, 0.5 * BOUND, False),  # with much cancellation
        (2.1 * BOUND, 0.5 * BOUND, True),
        (2 * LARGEST_ROUNDING, 1.1 * LARGEST_ROUNDING, True),  # too much rounding for a comparison
    ],
)
def test_the_bound_is_a_multiple_of_the_rounding_of_the_truth(error, rounding, missed):
    one = torch.ones(3, dtype=torch.float64)
    truth = Run(None, None, {"weight": one})
    truth.again = lambda seed: Run(None, None, {"weight": one * (1 + rounding * (seed == ORDERS - 1))})
    found = Run(None, None, {"weight": one * (1 + error)})
    assert bool(beyond_bound(found.distances(truth))) == missed


def test_a_pass_is_repeated_with_the_same_random_numbers():
    run = Run.repeatable(lambda: Run(torch.rand(()), None, {}))
    state = torch.get_rng_state()
    assert run.again(0).loss == run.loss
    assert torch.equal(torch.get_rng_state(), state)


LOGITS = torch.tensor([[0.5, -0.3, 1.2, 0.1]])


@pytest.mark.parametrize(
    "options", [{}, {"score": "sigmoid", "correction_bias": torch.tensor([0.0, 0, 0, 0.1])}]
)
def test_a_choice_of_experts_near_a_tie_is_refused(options):
    """With two experts per token, the third is as good as the second, up to 1e-6."""
    with clear_of_ties(1e-5):
        router.route(LOGITS, 2, **options)
    near = LOGITS.clone()
    # The expert's correction bias is 0.1 above the others', so its score may be 0.1 below.
    near[0, 3] = 0.5 if not options else torch.logit(torch.tensor(0.5).sigmoid() - 0.1)
    near[0, 3] -= 1e-6
    with clear_of_ties(1e-5), pytest.raises(TieError, match=r"tokens \[0\]"):
        router.route(near, 2, **options)


@pytest.mark.parametrize("last", [0.5 - 1e-6, 1.2 * 0.6 - 1e-6], ids=["second_place", "nearness"])
def test_a_sparse_mixers_choice_near_a_tie_is_refused(last):
    """At a tie for second place, and at the bound, 2 * 0.2 below the best, beyond which an expert has no
    share.
    """
    with clear_of_ties(1e-5):
        router.decide(LOGITS, 0.2, None)
    near = LOGITS.clone()
    near[0, 3] = last
    with clear_of_ties(1e-5), pytest.raises(TieError, match=r"tokens \[0\]"):
        router.decide(near, 0.2, None)
