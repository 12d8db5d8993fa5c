"""Experts of every token that share in the router's softmax, against the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from liger_models.layers.experts.modal_experts import make_experts
from liger_models.layers.specs import MoESpec

HIDDEN, INNER = 8, 5
SPEC = MoESpec(
    *(5, 2, INNER),
    score="sigmoid",
    correction_bias=True,
    float32_router=True,
    routed_scaling_factor=1.7,
    sink_experts=2,
)


def by_hand(mixture, token):
    """One token, expert by expert."""
    router = mixture.router
    logits = router.weight @ token
    chosen = (logits[:5].sigmoid() + router.correction_bias).topk(2).indices
    scores = torch.cat([logits[chosen], logits[5:]]).sigmoid()
    weights = 1.7 * router.global_scale * scores / scores.sum()
    matrices = [(mixture.experts, int(e)) for e in chosen] + [(mixture.sinks, s) for s in range(2)]
    total = torch.zeros_like(token)
    for weight, (stack, e) in zip(weights, matrices, strict=True):
        gate, up = (stack.gate_up_proj[e] @ token).chunk(2)
        total = total + weight * (stack.down_proj[e] @ (F.silu(gate) * up))
    return total


def test_the_output_and_its_gradients_equal_the_formula(randomised):
    torch.manual_seed(0)
    mixture = randomised(make_experts(HIDDEN, SPEC)).double()
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    found = mixture(x)
    expected = torch.stack([by_hand(mixture, token) for token in x])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent, parameters = torch.randn_like(found), list(mixture.parameters())
    gradients = [torch.autograd.grad(y, parameters, cotangent) for y in (found, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)


def test_weights_sum_to_the_scale_where_all_sigmoids_vanish():
    router = make_experts(HIDDEN, SPEC).router
    with torch.no_grad():
        router.weight.fill_(-40.0)
    _, weights, _ = router(torch.ones(3, HIDDEN))
    torch.testing.assert_close(weights, torch.full((3, 4), 1.7 / 4))


def test_other_settings_are_refused():
    for name, value in (
        ("bias", True),
        ("latent_size", 3),
        ("expert_scale", True),
        ("float32_router", False),
    ):
        with pytest.raises(ValueError, match="sink_experts"):
            make_experts(HIDDEN, MoESpec(**{**vars(SPEC), name: value}))
