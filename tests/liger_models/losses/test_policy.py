"""Policy losses and their gradients equal TRL's on synthetic scores."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from trl_trainers import fused_output, trainer

from liger_models.losses import (
    PolicyOptions,
    group_advantages,
    grpo_loss,
    on_policy,
    rloo_advantages,
    rloo_loss,
    sampler_ratio,
    sequence_log_probs,
    sft_loss,
    top_entropy,
    value_loss,
)
from liger_models.losses.grpo_loss import TYPES

trl = pytest.importorskip("trl", reason="trl is not installed")

N, SEQ = 6, 7


@pytest.fixture
def samples():
    """Answers of several lengths, with all kinds of scores."""
    mask = (torch.arange(SEQ) < torch.tensor([7, 3, 5, 1, 6, 4])[:, None]).long()
    log_probs = -torch.rand(N, SEQ) - 0.5
    return {
        "mask": mask,
        "log_probs": log_probs.requires_grad_(),
        "old": log_probs.detach() + 0.5 * torch.randn(N, SEQ),
        "reference": log_probs.detach() + 0.5 * torch.randn(N, SEQ),
        "advantages": torch.tensor([1.0, -0.7, 0.0, 2.0, -1.5, 0.3]),
        "entropies": torch.rand(N, SEQ),
    }


def high_of(loss_type):
    """Return the clipping bound of ratios; for CISPO the largest ratio, which some samples stay below."""
    return 1.2 if loss_type == "cispo" else 0.3


def trl_grpo(samples, loss_type, inputs=None, **options):
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    mask, scores = samples["mask"], samples["log_probs"]
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    args = {name: options.pop(name, value) for name, value in args.items()}
    defaults = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": high_of(loss_type),
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 11,
        "_entropy_bonus_enabled": False,
    }
    made = trainer(
        GMPOTrainer if loss_type == "gmpo" else GRPOTrainer,
        loss_type=loss_type,
        args=SimpleNamespace(**args),
        _get_per_token_logps_and_entropies=lambda *_, **__: (scores, samples["entropies"], None),
        **(defaults | options),
    )
    ids = torch.zeros_like(mask)
    common = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": samples["advantages"],
        "old_per_token_logps": samples["old"],
        "ref_per_token_logps": samples["reference"],
        "num_items_in_batch": mask.sum(),
    }
    loss = made._compute_loss(None, common | (inputs or {}))
    return loss, {name: values[0] for name, values in made._metrics["train"].items()}


def ours_grpo(samples, loss_type, *, with_old=True, inputs=None, **options):
    options = {"low": 0.2, "high": high_of(loss_type), "loss_type": loss_type} | options
    if loss_type == "dr_grpo":
        options["length"] = 11
    old = {"old_log_probs": samples["old"]} if with_old else {}
    given = (samples["log_probs"], samples["advantages"], samples["mask"], PolicyOptions(**options))
    return grpo_loss(*given, reference=samples["reference"], **old, **(inputs or {}))


def check(samples, assert_same, ours, theirs):
    assert_same(ours, theirs, samples["log_probs"])


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_grpo_matches_trl(name, beta, samples, assert_same):
    ours = ours_grpo(samples, name, beta=beta)
    theirs, metrics = trl_grpo(samples, name, beta=beta)
    check(samples, assert_same, ours.loss, theirs)
    if beta:
        assert math.isclose(ours.kl, metrics["kl"], rel_tol=1e-5)
    for shown in ("clip_ratio/region_mean", "cispo_clip_ratio"):
        assert shown not in metrics or math.isclose(ours.clipped, metrics[shown], rel_tol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "luspo", "dapo"])
def test_ratios_of_sequences_match_trl(name, samples, assert_same):
    ours = ours_grpo(samples, name, level="sequence", beta=0.1, unbiased_kl=True)
    options = {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True}
    check(samples, assert_same, ours.loss, trl_grpo(samples, name, **options)[0])


def test_two_sided_clipping_and_the_unbiased_kl_match_trl(samples, assert_same):
    ours = ours_grpo(samples, "grpo", delta=1.4, beta=0.1, unbiased_kl=True)
    theirs, _ = trl_grpo(samples, "grpo", delta=1.4, beta=0.1, use_bias_correction_kl=True)
    check(samples, assert_same, ours.loss, theirs)
    assert not torch.equal(ours.loss, ours_grpo(samples, "grpo", beta=0.1, unbiased_kl=True).loss)


def test_on_fresh_samples_ratios_are_one(samples, assert_same):
    ours = ours_grpo(samples, "grpo", with_old=False)
    theirs, _ = trl_grpo(samples, "grpo", {"old_per_token_logps": None})
    check(samples, assert_same, ours.loss, theirs)
    counted = samples["mask"]
    coefficients = samples["advantages"][:, None] * counted / counted.sum(1, keepdim=True) / N
    (expected,) = torch.autograd.grad(-(coefficients * samples["log_probs"]).sum(), samples["log_probs"])
    (gradient,) = torch.autograd.grad(ours.loss, samples["log_probs"])
    torch.testing.assert_close(gradient, expected)  # the gradient of a score with known coefficients


def test_the_choice_of_high_entropy_tokens_matches_trl(samples, assert_same):
    kept = top_entropy(samples["entropies"], samples["mask"], 0.37)
    assert kept.sum() == 10  # of 26
    ours = ours_grpo(samples, "dapo", inputs={"kept": kept}, beta=0.1)
    theirs, _ = trl_grpo(samples, "dapo", top_entropy_quantile=0.37, beta=0.1)
    check(samples, assert_same, ours.loss, theirs)


def test_the_mask_of_off_policy_sequences_matches_trl(samples, assert_same):
    sampler = samples["old"] + 0.3 * torch.randn(N, SEQ)
    kept = on_policy(samples["log_probs"], sampler, samples["advantages"], samples["mask"], 0.05)
    assert 0 < kept.sum() < N
    ours = ours_grpo(samples, "grpo", inputs={"kept": kept})
    given = {"sampling_per_token_logps": sampler}
    theirs, _ = trl_grpo(samples, "grpo", given, off_policy_mask_threshold=0.05)
    check(samples, assert_same, ours.loss, theirs)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_ratios_to_the_sampler_follow_their_definition_and_match_trl(mode, samples, assert_same):
    sampler = samples["old"] + 0.4 * torch.randn(N, SEQ)
    sampler[0, 2] = math.nan
    ratio = sampler_ratio(samples["old"], sampler, samples["mask"], mode, 0.7, 1.5)
    difference = (samples["old"] - sampler).masked_fill(samples["mask"] == 0, 0.0)
    difference[0, 2] = 0.0
    if mode.startswith("sequence"):
        difference = difference.sum(1, keepdim=True)
    exact = difference.exp()
    inside = (exact >= 0.7) & (exact <= 1.5)
    assert inside.any()
    assert not inside.all()
    bounded = exact.clamp(0.7, 1.5) if mode.endswith("truncate") else exact * inside
    torch.testing.assert_close(ratio, bounded)
    for name in ("grpo", "vespo") if mode.startswith("token") else ("grpo",):
        ours = ours_grpo(samples, name, inputs={"sampler_ratio": ratio})
        theirs, _ = trl_grpo(samples, name, {"importance_sampling_ratio": ratio}, use_vllm=True)
        check(samples, assert_same, ours.loss, theirs)


def test_advantages_may_differ_by_token(samples, assert_same):
    each = torch.randn(N, SEQ)
    samples["advantages"] = each
    check(samples, assert_same, ours_grpo(samples, "dapo").loss, trl_grpo(samples, "dapo")[0])


@pytest.mark.parametrize("name", TYPES)
def test_uneven_parts_of_a_step_give_its_mean(name, samples, assert_same):
    whole = ours_grpo(samples, name).loss
    by_tokens = name in ("bnpo", "dapo", "cispo", "vespo")
    total = (samples["mask"].sum() if by_tokens else N) / 2  # for two ranks
    options = PolicyOptions(name, high=high_of(name), length=11 if name == "dr_grpo" else None)
    columns = [samples[key] for key in ("log_probs", "advantages", "mask", "old")]
    parts = [
        grpo_loss(a, b, c, options, old_log_probs=d, num_items=total).loss
        for a, b, c, d in zip(*(column.split([2, 4]) for column in columns), strict=True)
    ]
    check(samples, assert_same, sum(parts) / 2, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "unknown loss_type"),
        ({"level": "group"}, "expected 'token' or 'sequence'"),
        ({"loss_type": "vespo", "level": "sequence"}, "leave level"),
        ({"loss_type": "dr_grpo"}, "only dr_grpo takes a length"),
        ({"length": 7}, "only dr_grpo takes a length"),
        ({"delta": 1.1}, "more than 1 \\+ high"),
        ({"loss_type": "cispo"}, "for cispo it is the largest ratio"),
        ({"loss_type": "cispo", "high": 0.28}, "for cispo it is the largest ratio"),
    ],
)
def test_incompatible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**options)


WRONG = {
    "sums": lambda zeros: grpo_loss(zeros[:, 0], zeros[:, 0], zeros[:, 0]),
    "advantages": lambda zeros: grpo_loss(zeros, zeros[:, :1], zeros),
    "counted": lambda zeros: grpo_loss(zeros, zeros[:, 0], zeros[:1]),
    "old_log_probs": lambda zeros: grpo_loss(zeros, zeros[:, 0], zeros, old_log_probs=zeros[:, :1]),
    "kept": lambda zeros: grpo_loss(zeros, zeros[:, 0], zeros, kept=zeros[0]),
    "returns": lambda zeros: value_loss(zeros, zeros[:, :1], zeros),
    "weights": lambda zeros: sft_loss(zeros, zeros, weights=zeros[0]),
    "sampler": lambda zeros: sampler_ratio(zeros, zeros[:1], zeros),
    "drift": lambda zeros: on_policy(zeros, zeros[:, :1], zeros[:, 0], zeros, 0.1),
    "entropy": lambda zeros: top_entropy(zeros, zeros[:1], 0.5),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_over_tokens_are_never_broadcast(name):
    with pytest.raises(ValueError, match=r"expected token scores, \[N, seq\]"):
        WRONG[name](torch.zeros(3, 3))


def test_tensors_over_answers_are_never_broadcast():
    with pytest.raises(ValueError, match="expected one number per sequence"):
        rloo_loss(torch.zeros(3), torch.zeros(3, 1))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda zeros: on_policy(zeros, zeros, zeros, zeros, 0.1), "expected one per sequence"),
        (lambda zeros: top_entropy(zeros, zeros, 20.0), "from 0 to 1"),
        (lambda zeros: sampler_ratio(zeros, zeros, zeros, low=4.0), "low below high"),
        (lambda zeros: group_advantages(zeros[0], 1), "at least 2"),
        (lambda zeros: rloo_advantages(zeros[0], 1), "at least 2"),
    ],
)
def test_inputs_that_would_weight_tokens_wrongly_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made(torch.zeros(3, 3))


def test_a_kl_term_needs_a_reference(samples):
    with pytest.raises(ValueError, match="needs the reference"):
        grpo_loss(samples["log_probs"], samples["advantages"], samples["mask"], PolicyOptions(beta=0.1))


def test_rloo_matches_trl(samples, assert_same):
    from trl import RLOOTrainer

    mask = samples["mask"]
    log_probs, old = samples["log_probs"], (samples["old"] * mask).sum(1)
    made = trainer(
        RLOOTrainer,
        epsilon_low=0.2,
        epsilon_high=0.3,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, samples["entropies"], None),
    )
    ids = torch.zeros_like(mask)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids}
    inputs |= {"completion_mask": mask, "old_logps": old, "advantages": samples["advantages"]}
    theirs = made._compute_loss(None, inputs)
    sums = sequence_log_probs(log_probs * mask)
    assert_same(rloo_loss(sums, samples["advantages"], old, high=0.3), theirs, log_probs)


def test_advantages_of_groups_follow_their_formulas():
    rewards = torch.tensor([1.0, 3.0, 5.0, 2.0, 2.0, math.nan])
    deviations = torch.tensor([-2.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(group_advantages(rewards, 3, "none"), deviations)
    torch.testing.assert_close(group_advantages(rewards, 3), deviations / 2.0001, rtol=1e-6, atol=0)
    spread = rewards[:5].std()
    torch.testing.assert_close(group_advantages(rewards, 3, "batch"), deviations / (spread + 1e-4))
    expected = torch.tensor([-3.0, 0.0, 3.0, 0.0, 0.0, 0.0])  # minus the mean of the others with a reward
    torch.testing.assert_close(rloo_advantages(rewards, 3), expected)
    normalized = expected[:5] / (expected[:5].std() + 1e-4)
    torch.testing.assert_close(rloo_advantages(rewards, 3, normalize=True)[:5], normalized)
    for function in (group_advantages, rloo_advantages):
        with pytest.raises(ValueError, match="groups of 4"):
            function(rewards, 4)
    with pytest.raises(ValueError, match="'none'"):
        group_advantages(rewards, 3, "all")


def test_the_value_loss_follows_its_formula():
    values, returns = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5)
    old, counted = values.detach() + torch.randn(2, 5), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    loss = value_loss(values, returns, counted, old, clip=0.3)
    terms = []
    for v, r, o in zip(*(t[counted.bool()] for t in (values, returns, old)), strict=True):
        near = min(max(v, o - 0.3), o + 0.3)
        terms.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
    torch.testing.assert_close(loss, sum(terms) / 6)
    gradient = torch.autograd.grad(loss, values)[0]
    assert not gradient[counted == 0].any()
    torch.testing.assert_close(
        value_loss(values, returns, counted, num_items=12),
        0.5 * ((values - returns) ** 2 * counted).sum() / 12,
    )


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_fine_tuning_losses_match_trl(loss_type, samples, assert_same):
    from trl import SFTTrainer

    mask = samples["mask"].bool()
    log_probs = samples["log_probs"] * mask
    args = SimpleNamespace(loss_type=loss_type, average_tokens_across_devices=False)
    made = trainer(SFTTrainer, args=args, compute_loss_func=None, label_smoother=None)
    made.accelerator.parallelism_config = None
    inputs = {"labels": torch.zeros(N, SEQ), "attention_mask": mask}
    output = fused_output(log_probs, label_mask=mask)
    for count in (None, 40):
        theirs = made.compute_loss(lambda **_: output, dict(inputs), num_items_in_batch=count)
        ours = sft_loss(log_probs, mask, dynamic=loss_type == "dft", num_items=count)
        assert_same(ours, theirs, samples["log_probs"])


def test_token_weights_multiply_log_probabilities(samples):
    weights = torch.rand(N, SEQ)
    mask, log_probs = samples["mask"], samples["log_probs"]
    loss = sft_loss(log_probs, mask, weights=weights)
    torch.testing.assert_close(loss, -(weights * mask * log_probs).sum() / mask.sum())
