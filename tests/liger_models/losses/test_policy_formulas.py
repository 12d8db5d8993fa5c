"""Policy losses and their gradients, in float64, against their papers' formulas written out in loops."""

from __future__ import annotations

import pytest
import torch

from liger_models.losses import PolicyOptions, grpo_loss, kl_estimate, sampler_ratio

LENGTHS = (4, 1, 3)
SEQ = max(LENGTHS)
LOW, HIGH = 0.2, 0.3


@pytest.fixture
def samples():
    """One group of answers; ratios lie on both sides of every bound, for advantages of both signs."""
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(3, SEQ, generator=generator, dtype=torch.double) - 0.5
    log_ratio = torch.tensor([[0.5, -0.6, 0.1, 0.02], [0.6, 0.0, 0.0, 0.0], [0.55, -0.5, -0.05, 0.0]])
    return {
        "log_probs": (old + log_ratio.double()).requires_grad_(),
        "old": old,
        "advantages": torch.tensor([1.5, 0.4, -0.8], dtype=torch.double),
        "counted": torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None],
    }


def tokens(samples):
    """(answer, its advantage, its tokens' log ratios and log-probabilities) of each answer."""
    for i, length in enumerate(LENGTHS):
        log_probs = samples["log_probs"][i, :length]
        yield i, samples["advantages"][i], log_probs - samples["old"][i, :length], log_probs


def clipped(ratio, advantage, low=LOW, high=HIGH):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(samples):  # Shao et al., eq. 3
    return -sum(clipped(r.exp(), a).sum() / len(r) for _, a, r, _ in tokens(samples)) / len(LENGTHS)


def dapo(samples):  # Yu et al., eq. 8
    return -sum(clipped(r.exp(), a).sum() for _, a, r, _ in tokens(samples)) / sum(LENGTHS)


def dr_grpo(samples):  # Liu et al., section 3.2, with a constant for the number of tokens
    return -sum(clipped(r.exp(), a).sum() for _, a, r, _ in tokens(samples)) / (len(LENGTHS) * 9)


def gspo(samples):  # Zheng et al., eqs. 5 and 7
    return -sum(clipped(r.mean().exp(), a) for _, a, r, _ in tokens(samples)) / len(LENGTHS)


def cispo(samples):  # MiniMax-M1, eqs. 4 and 5, with no lower bound as in its experiments
    sums = [(r.exp().clamp(max=1.2).detach() * a * p).sum() for _, a, r, p in tokens(samples)]
    return -sum(sums) / sum(LENGTHS)


def gmpo(samples):  # Zhao et al., eq. 4
    total = 0.0
    for _, a, r, _ in tokens(samples):
        ratio, sign = r.exp(), a.sign()
        bounded = ratio.clamp(torch.tensor(-LOW).exp().double(), torch.tensor(HIGH).exp().double())
        least = torch.minimum((ratio**sign), (bounded**sign)) ** sign
        total = total + least.prod() ** (1 / len(r)) * a
    return -total / len(LENGTHS)


FORMULAS = {
    "grpo": (grpo, {}),
    "dapo": (dapo, {}),
    "dr_grpo": (dr_grpo, {"length": 9}),
    "gspo": (gspo, {"loss_type": "grpo", "level": "sequence"}),
    "cispo": (cispo, {"high": 1.2}),
    "gmpo": (gmpo, {}),
}


def assert_same(found, expected, log_probs):
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (found, expected)]
    assert gradients[1].any()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_are_those_of_their_papers(name, samples):
    formula, changes = FORMULAS[name]
    options = PolicyOptions(**{"loss_type": name, "low": LOW, "high": HIGH} | changes)
    given = [samples[key] for key in ("log_probs", "advantages", "counted")]
    found = grpo_loss(*given, options, old_log_probs=samples["old"])
    assert found.loss.dtype == torch.double
    assert 0 < found.clipped < 1
    assert_same(found.loss, formula(samples), samples["log_probs"])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections_for_the_sampler_weight_tokens_or_sequences(level, samples):
    """Truncated importance sampling (Yao et al.): min(p_old / p_sampler, C) times each token's term; masked:
    zero outside the bounds (IcePop)."""
    sampler = samples["old"] - torch.tensor([[0.9, -0.2, 0.4, 0.1], [0.1, 0, 0, 0], [-1.1, 0.3, 0.2, 0]])
    options = PolicyOptions("dapo", low=LOW, high=HIGH)
    for rule in ("truncate", "mask"):
        ratio = sampler_ratio(samples["old"], sampler, samples["counted"], f"{level}_{rule}", 0.5, 2.0)
        total = 0.0
        for i, a, r, _ in tokens(samples):
            exact = (samples["old"] - sampler)[i, : len(r)]
            exact = (exact if level == "token" else exact.sum().expand(len(r))).exp()
            weight = (
                exact.clamp(0.5, 2.0) if rule == "truncate" else exact * ((exact >= 0.5) & (exact <= 2.0))
            )
            total = total - (weight * clipped(r.exp(), a)).sum()
        given = [samples[key] for key in ("log_probs", "advantages", "counted")]
        found = grpo_loss(*given, options, old_log_probs=samples["old"], sampler_ratio=ratio)
        assert_same(found.loss, total / sum(LENGTHS), samples["log_probs"])


def test_gmpo_leaves_tokens_out_of_its_mean_and_sequences_out_of_the_loss(samples):
    options = PolicyOptions("gmpo", low=LOW, high=HIGH)
    given = [samples[key] for key in ("log_probs", "advantages", "counted")]
    kept = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]])
    found = grpo_loss(*given, options, old_log_probs=samples["old"], kept=kept).loss
    fewer = (samples["counted"] & kept.bool())[[0, 2]]
    pair = [samples[key][[0, 2]] for key in ("log_probs", "advantages")]
    expected = grpo_loss(*pair, fewer, options, old_log_probs=samples["old"][[0, 2]]).loss * 2 / 3
    assert_same(found, expected, samples["log_probs"])
    for name, value in (("advantages", samples["old"]), ("sampler_ratio", samples["old"].exp())):
        inputs = {"advantages": samples["advantages"]} | {name: value}
        with pytest.raises(ValueError, match=f"found {name} .* whole sequences"):
            grpo_loss(samples["log_probs"], counted=samples["counted"], options=options, **inputs)


@pytest.fixture
def policies():
    """Logits of a policy, and the log-probabilities of a reference and an older policy, of five tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.double).requires_grad_()
    others = torch.randn(2, 5, generator=generator, dtype=torch.double).log_softmax(1)
    return logits, *others


def gradient(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def expected_gradient(logits, term, sampler):
    """The gradient of the term's expectation over tokens of the sampler, which is held constant."""
    return gradient((sampler.detach().exp() * term).sum(), logits)


def divergence(p, q):
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_estimates_of_kl_have_the_stated_means_and_gradients(name, policies):
    """Exactly, as sums over the vocabulary."""
    logits, q, _ = policies
    p = logits.log_softmax(0)
    term = kl_estimate(p[None], q[None], name)[0]
    mean = (p.exp() * term).sum()
    if name != "k2":
        torch.testing.assert_close(mean, divergence(p, q))
    right, backwards = gradient(divergence(p, q), logits), gradient(divergence(q, p), logits)
    expected = {"k1": torch.zeros(5, dtype=torch.double), "k3": backwards}.get(name, right)
    torch.testing.assert_close(expected_gradient(logits, term, p), expected)


@pytest.mark.parametrize(
    ("kl", "unbiased"), [("k2", False), ("k1+", False), ("k3+", False), ("k1", True), ("k3", True)]
)
def test_the_kl_term_of_the_loss_has_the_gradient_of_kl(kl, unbiased, policies):
    """Off policy, too, where a term is multiplied by its ratio."""
    logits, q, older = policies
    p = logits.log_softmax(0)
    sampler = older if unbiased else p
    options = PolicyOptions("dapo", beta=1.0, kl=kl, unbiased_kl=unbiased)
    zeros, one = torch.zeros(1, dtype=torch.double), torch.ones(1, 1)
    losses = []
    for c in range(5):
        old = {"old_log_probs": sampler[[c], None], "reference": q[[c], None]}
        losses.append(grpo_loss(p[[c], None], zeros, one, options, **old).loss)
    found = expected_gradient(logits, torch.stack(losses), sampler)
    torch.testing.assert_close(found, gradient(divergence(p, q), logits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": "k1"}, "kl is 'k1'; expected k2, k3, k1\\+, k3\\+"),
        ({"kl": "k2", "unbiased_kl": True}, "kl is 'k2'; expected k1, k3"),
        ({"loss_type": "gmpo", "level": "sequence"}, "gmpo computes sequence ratios itself"),
        ({"loss_type": "gmpo", "delta": 3.0}, "takes neither"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**options)
