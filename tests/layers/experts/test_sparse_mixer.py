"""Two experts drawn in training: against transformers' function, and against the quantity it estimates."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from liger_models.layers.experts.input_noise import InputNoise
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.experts.router import SparseMixerRouter
from liger_models.layers.experts.sparse_mixer import decide, draw_noise, weigh
from liger_models.layers.specs import MoESpec, SparseMixerSpec

TOKENS, HIDDEN, EXPERTS, JITTER = 60, 12, 6, 0.4
SPEC = MoESpec(EXPERTS, 2, 8, sparse_mixer=SparseMixerSpec(JITTER))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def in_their_order(logits):
    """The reference draws the last of the uniform numbers twice, and takes the second."""
    first = torch.empty_like(logits).exponential_(), torch.rand_like(logits[:, :1])
    second = torch.empty_like(logits).exponential_(), torch.rand_like(logits[:, :1]).uniform_()
    return [first, second]


def chosen(scores, draws=None):
    decision = decide(scores.detach(), JITTER, draws)
    return weigh(scores, *decision), decision


@pytest.mark.parametrize("training", [False, True])
def test_weights_experts_and_gradients_match_transformers(training):
    reference = pytest.importorskip("transformers.models.phimoe.modeling_phimoe").sparsemixer
    scores = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    torch.manual_seed(5)
    weights, (experts, factors, near) = chosen(scores, in_their_order(scores) if training else None)
    torch.manual_seed(5)
    expected, theirs = reference(scores, JITTER, training)
    assert torch.equal(experts, theirs.int())
    assert near.any(-1).all()
    assert not near.all()
    assert (factors < 1).any() == training
    upstream = torch.randn_like(weights)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)  # a few roundings
    found, true = (torch.autograd.grad(w, scores, upstream)[0] for w in (weights, expected))
    assert (found - true).norm() <= 1e-6 * true.norm()


def test_ties_are_broken_as_in_the_reference():
    reference = pytest.importorskip("transformers.models.phimoe.modeling_phimoe").sparsemixer
    scores = torch.randint(-1, 2, (TOKENS, EXPERTS)).float()
    assert torch.equal(chosen(scores)[1][0], reference(scores, JITTER, False)[1].int())


def test_experts_are_drawn_according_to_their_shares():
    rows = 20_000
    scores = torch.tensor([0.9, 1.0, 0.2, 0.95, -3.0, 0.5]).expand(rows, EXPERTS)
    _, (experts, factors, near) = chosen(scores, draw_noise(scores))
    near = near[0, 0]
    assert near.tolist() == [True, True, True, True, False, True]  # (1 - s) / 1 is up to 0.8
    shares = scores[0].masked_fill(~near, -torch.inf).softmax(-1)
    found = experts[:, 0].long().bincount(minlength=EXPERTS) / rows
    # A share p is within five standard deviations, sqrt(p (1 - p) / rows), in all but one of a million
    # cases.
    assert ((found - shares).abs() <= 5 * (shares * (1 - shares) / rows).sqrt()).all()
    assert (experts[:, 0] != experts[:, 1]).all()
    likeliest = experts[:, 0] == 1
    assert (factors[likeliest, 0] == 1).all()
    whole = (factors[~likeliest, 0] == 1).float().mean()
    assert abs(whole - 0.25) <= 5 * (0.25 * 0.75 / int((~likeliest).sum())) ** 0.5


def test_the_gradient_is_the_probabilitys_without_its_factor():
    scores = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    decision = decide(scores.detach(), JITTER, draw_noise(scores))
    weights = weigh(scores, *decision)
    experts, factors, near = decision
    shares = scores[:, None].masked_fill(~near, -torch.inf).softmax(-1)
    share = shares.gather(-1, experts.long()[..., None])[..., 0]
    torch.testing.assert_close(weights, share * factors)
    upstream = torch.randn_like(weights)
    found, expected = (
        torch.autograd.grad(w, scores, upstream, retain_graph=True)[0] for w in (weights, share)
    )
    assert torch.equal(found, expected)


def test_in_evaluation_nothing_is_drawn(randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, replace(SPEC, input_noise=0.1)))
    x = torch.randn(TOKENS, HIDDEN)
    state = torch.get_rng_state()
    assert torch.equal(layer.eval()(x), layer(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(layer.train()(x), layer(x))


def test_noise_is_within_its_bounds_and_has_its_gradient():
    noise, x = InputNoise(0.1), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    y = noise(x)
    factors = (y / x).detach()
    assert 0.9 - 1e-6 <= factors.min() < 0.92 < 1.08 < factors.max() <= 1.1 + 1e-6
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], factors)
    assert noise.eval()(x) is x


@pytest.mark.parametrize("training", [False, True])
def test_nan_in_a_token_affects_that_token_only(training, randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, SPEC)).train(training)
    x = torch.randn(9, HIDDEN)
    outputs = []
    for broken in (False, True):
        torch.manual_seed(1)
        outputs.append(layer(torch.where(torch.arange(9)[:, None] == 4, torch.nan, x) if broken else x))
    others = torch.arange(9) != 4
    assert outputs[1][4].isnan().all()
    # Sums over HIDDEN and 8 elements, in products of other sizes.
    torch.testing.assert_close(outputs[1][others], outputs[0][others], rtol=1e-5, atol=1e-6)


def test_zero_tokens_and_one_token_work(randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, SPEC))
    assert layer(torch.randn(0, HIDDEN)).shape == (0, HIDDEN)
    assert layer(torch.randn(1, HIDDEN)).shape == (1, HIDDEN)


@pytest.mark.parametrize(
    "other", [{"experts_per_token": 3}, {"score": "sigmoid"}, {"correction_bias": True}, {"num_groups": 2}]
)
def test_options_that_this_router_lacks_are_refused(other):
    with pytest.raises(ValueError, match=f"by its own rule; it does not support {next(iter(other))}="):
        SparseMixerRouter(HIDDEN, replace(SPEC, **other))


def test_the_decision_is_made_once(randomised, monkeypatch):
    module = importlib.import_module("liger_models.layers.experts.router")
    router = randomised(SparseMixerRouter(HIDDEN, SPEC))
    logits = torch.randn(TOKENS, EXPERTS)
    weights, made = router._choose(logits, None)
    monkeypatch.setattr(module, "decide", None)
    state = torch.get_rng_state()
    again, same = router._choose(logits, made)
    assert torch.equal(again, weights)
    assert all(a is b for a, b in zip(made, same, strict=True))
    assert not torch.equal(torch.get_rng_state(), state)  # drawn, and not used
