"""Preference losses and their gradients equal TRL's on synthetic scores, or their formulas without TRL."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl_trainers import fused_output, trainer

import liger_models
from liger_models.architectures import find_architecture
from liger_models.losses import (
    cpo_loss,
    dpo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    reward_loss,
    rows_of_documents,
    sequence_log_probs,
    simpo_loss,
    wpo_weights,
)
from liger_models.losses.dpo_loss import TYPES

trl = pytest.importorskip("trl", reason="trl is not installed")

PAIRS, SEQ = 4, 9


def rows():
    """Mask of answers [2 * PAIRS, SEQ], scores from the second token on [2 * PAIRS, SEQ - 1], their leaf."""
    mask = torch.zeros(2 * PAIRS, SEQ, dtype=torch.long)
    for row, (start, end) in enumerate([(2, 9), (3, 6), (1, 4), (4, 9), (2, 5), (3, 9), (1, 2), (4, 8)]):
        mask[row, start:end] = 1
    leaf = -torch.rand(2 * PAIRS, SEQ - 1)
    return mask, leaf.requires_grad_() * mask[:, 1:], leaf


def trl_dpo(mask, log_probs, reference, loss_types, weights=None, **options):
    from trl import DPOTrainer

    defaults = {
        "beta": 0.3,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
    }
    squares = options.pop("log_sum_sq_probs", torch.zeros_like(log_probs))
    of_tokens = reference.dim() == 2
    made = trainer(
        DPOTrainer,
        loss_types=loss_types,
        loss_weights=weights or [1.0] * len(loss_types),
        precompute_ref_logps=not of_tokens,
        ref_model=lambda **_: fused_output(reference),
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        **(defaults | options),
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[:PAIRS],
        "ref_rejected_logps": reference[PAIRS:],
    }
    output = fused_output(log_probs, log_sum_sq_probs=squares)
    return made._compute_loss(lambda **_: output, inputs, False)


def ours_dpo(mask, log_probs, reference, desensitized=None, **options):
    sums = sequence_log_probs(log_probs, mask[:, 1:], desensitized)
    if reference.dim() == 2:
        reference = sequence_log_probs(reference, mask[:, 1:], desensitized)
    lengths = mask[:, 1:].sum(1)
    options = {"beta": 0.3} | options
    if "sft" in options.get("loss_type", ()):
        options["nll"] = -log_probs[:PAIRS].sum() / lengths[:PAIRS].sum()
    names = ("chosen_lengths", "rejected_lengths")
    return dpo_loss(
        *sums.chunk(2), *reference.chunk(2), **dict(zip(names, lengths.chunk(2), strict=True)), **options
    )


SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_dpo_matches_trl(name, assert_same):
    mask, log_probs, leaf = rows()
    reference = -3 * torch.rand(2 * PAIRS)
    options = {"label_smoothing": 0.1} if name in SMOOTHED else {}
    ours = ours_dpo(mask, log_probs, reference, loss_type=name, **options)
    assert_same(ours.loss, trl_dpo(mask, log_probs, reference, [name], **options), leaf)


def test_all_of_trls_types_are_implemented():
    from trl import DPOConfig

    text = DPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert {name for name in TYPES if f"'{name}'" in text} == set(TYPES)
    assert len(TYPES) == 15


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "discopop"])
def test_other_divergences_match_trl(divergence, name, assert_same):
    mask, log_probs, leaf = rows()
    reference = -3 * torch.rand(2 * PAIRS)
    ours = ours_dpo(mask, log_probs, reference, loss_type=name, f_divergence=divergence, f_alpha=0.7)
    theirs = {"f_divergence_type": divergence, "f_alpha_divergence_coef": 0.7}
    assert_same(ours.loss, trl_dpo(mask, log_probs, reference, [name], **theirs), leaf)


def test_large_ratios_of_an_alpha_divergence_match_trl(assert_same):
    mask, log_probs, leaf = rows()
    reference = -400 * torch.arange(2.0 * PAIRS)  # exp of half of it overflows float32
    ours = ours_dpo(mask, log_probs, reference, f_divergence="alpha_divergence", f_alpha=1.5)
    theirs = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.5}
    expected = trl_dpo(mask, log_probs, reference, ["sigmoid"], **theirs)
    assert expected.isfinite()
    assert_same(ours.loss, expected, leaf)


def test_weighted_sums_of_types_match_trl(assert_same):
    mask, log_probs, leaf = rows()
    reference = -3 * torch.rand(2 * PAIRS)
    mixture = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.5}
    ours = ours_dpo(mask, log_probs, reference, loss_type=mixture)
    theirs = trl_dpo(mask, log_probs, reference, [*mixture], weights=[*mixture.values()])
    assert_same(ours.loss, theirs, leaf)


@pytest.mark.parametrize("mixture", [{"sigmoid": 1.0}, {"ipo": 0.7, "sft": 1.5}], ids=["sigmoid", "mixture"])
def test_desensitised_lengths_match_trl(mixture, assert_same):
    """Lengths of the reference's scores are desensitised too; the likelihood term is over all tokens."""
    mask, log_probs, leaf = rows()
    reference = -3 * torch.rand(2 * PAIRS, SEQ - 1) * mask[:, 1:]
    ours = ours_dpo(mask, log_probs, reference, desensitized=0.4, loss_type=mixture)
    theirs = trl_dpo(mask, log_probs, reference, [*mixture], weights=[*mixture.values()], ld_alpha=0.4)
    assert_same(ours.loss, theirs, leaf)


def test_wpo_weights_match_trl(assert_same):
    mask, log_probs, leaf = rows()
    reference, squares = -3 * torch.rand(2 * PAIRS), -torch.rand(2 * PAIRS, SEQ - 1)
    ours = ours_dpo(mask, log_probs, reference, weights=wpo_weights(log_probs, squares, mask[:, 1:]))
    options = {"use_weighting": True, "log_sum_sq_probs": squares}
    assert_same(ours.loss, trl_dpo(mask, log_probs, reference, ["sigmoid"], **options), leaf)


def test_rewards_margins_and_accuracy_follow_their_formulas():
    chosen, rejected = torch.tensor([-1.0, -5.0]), torch.tensor([-3.0, -4.0])
    found = dpo_loss(chosen, rejected, torch.zeros(2), torch.zeros(2), beta=0.5)
    assert found.chosen_rewards.tolist() == [-0.5, -2.5]
    assert found.margin == 0.25
    assert found.accuracy == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmoyd"}, "unknown loss_type"),
        ({"loss_type": {}}, "unknown loss_type"),
        ({"f_divergence": "kl"}, "unknown f_divergence"),
        ({"loss_type": "apo_zero", "f_divergence": "forward_kl"}, "reverse_kl"),
        ({"loss_type": "ipo"}, "needs chosen_lengths"),
        ({"loss_type": "exo_pair"}, "above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
        ({"label_smoothing": 0.1}, "no effect"),
        ({"loss_type": "aot", "weights": torch.ones(2)}, "sorts the batch"),
        ({"loss_type": "sft"}, "sft needs nll"),
        ({"nll": torch.ones(())}, "sft needs nll"),
    ],
)
def test_incompatible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dpo_loss(*torch.zeros(4, 2), **options)


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 1.5}, {"label_smoothing": 0.1, "loss_type": "hinge"}]
)
def test_invalid_label_smoothing_is_refused(options):
    with pytest.raises(ValueError, match="or for sigmoid a number from 0"):
        cpo_loss(*torch.zeros(2, 3), **options)


WRONG = {
    "token scores": lambda: dpo_loss(*torch.zeros(4, 3, 5)),
    "reference": lambda: dpo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1), torch.zeros(3, 1)),
    "lengths": lambda: dpo_loss(
        *torch.zeros(4, 3), loss_type="ipo", chosen_lengths=torch.ones(1), rejected_lengths=torch.ones(3)
    ),
    "pairs": lambda: orpo_loss(torch.zeros(3), torch.zeros(1), torch.zeros(())),
    "cpo": lambda: cpo_loss(torch.zeros(3, 1), torch.zeros(3)),
    "simpo": lambda: simpo_loss(torch.zeros(3), torch.zeros(3, 3)),
    "good": lambda: kto_loss(torch.zeros(3), torch.zeros(3), torch.ones(3, 1).bool()),
    "strangers": lambda: kto_kl(torch.zeros(3), torch.zeros(3, 1)),
    "logits": lambda: reward_loss(torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_over_sequences_are_never_broadcast(name):
    """Broadcasting [N, 1] with [N] would give a loss over all N squared pairs."""
    with pytest.raises(ValueError, match=r"expected one number per sequence, \[N\] each"):
        WRONG[name]()


def test_the_mean_over_no_pairs_is_refused():
    with pytest.raises(ValueError, match="found no sequence"):
        dpo_loss(*torch.zeros(4, 0))
    assert dpo_loss(*torch.zeros(4, 0), num_items=3).loss == 0


def by_token(mask, log_probs):
    return (sequence_log_probs(log_probs) / mask[:, 1:].sum(1)).chunk(2)


def test_orpo_matches_trl(assert_same):
    from trl.experimental.orpo import ORPOTrainer

    mask, log_probs, leaf = rows()
    chosen, rejected = by_token(mask, log_probs)
    nll = -log_probs[:PAIRS].sum()
    theirs, *_ = trainer(ORPOTrainer, beta=0.3).odds_ratio_loss(chosen, rejected)
    assert_same(orpo_loss(chosen, rejected, nll, beta=0.3).loss, nll - theirs.mean(), leaf)


def test_odds_of_certain_answers_have_finite_gradients():
    chosen = torch.tensor([-1e-7, -20.0, -100.0], requires_grad=True)
    orpo_loss(chosen, chosen.detach().flip(0), torch.zeros(())).loss.backward()
    assert chosen.grad.isfinite().all()


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo_and_simpo_match_trl(name, assert_same):
    from trl.experimental.cpo import CPOTrainer

    mask, log_probs, leaf = rows()
    smoothing = 0.1 if name in ("sigmoid", "simpo") else 0.0
    means = name in ("ipo", "simpo")
    chosen, rejected = by_token(mask, log_probs) if means else sequence_log_probs(log_probs).chunk(2)
    nll = -log_probs[:PAIRS].mean()
    made = trainer(
        CPOTrainer, beta=0.7, alpha=0.0, loss_type=name, simpo_gamma=0.5, label_smoothing=smoothing
    )
    theirs = made.cpo_loss(chosen, rejected)[0].mean() + 0.2 * nll
    common = {"beta": 0.7, "alpha": 0.2, "label_smoothing": smoothing}
    if name == "simpo":
        ours = simpo_loss(chosen, rejected, nll, gamma=0.5, **common)
    else:
        ours = cpo_loss(chosen, rejected, nll, loss_type=name, **common)
    assert_same(ours.loss, theirs, leaf)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_kto_matches_trl(name, assert_same):
    from trl import KTOTrainer

    mask, log_probs, leaf = rows()
    label = torch.tensor([True, False, True, True, False, True, False, False])
    reference, other_reference = -3 * torch.rand(2, 2 * PAIRS)
    other = other_reference + torch.randn(2 * PAIRS) + 1
    made = trainer(
        KTOTrainer,
        beta=0.3,
        loss_type=name,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        precompute_ref_logps=True,
        calculate_KL=name == "kto",
        _compute_kl_logps=lambda model, batch: other,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": label,
        "ref_logps": reference,
        "ref_KL_logps": other_reference,
    }
    theirs = made._compute_loss(lambda **_: fused_output(log_probs), inputs, False)
    kl = kto_kl(other, other_reference) if name == "kto" else None
    assert kl is None or kl > 0
    ours = kto_loss(
        sequence_log_probs(log_probs),
        reference,
        label,
        kl,
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
    )
    assert_same(ours.loss, theirs, leaf)


def test_desirable_must_be_bool():
    with pytest.raises(ValueError, match=r"expected torch\.bool"):  # -1 does not mean False
        kto_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1, -1]))


def test_the_kl_term_is_never_below_zero():
    assert kto_kl(torch.tensor([-2.0]), torch.tensor([-1.0])) == 0


def test_reward_losses_match_trl(assert_same):
    from trl import RewardTrainer

    logits = torch.randn(2 * PAIRS, 1, requires_grad=True)
    margin = torch.rand(PAIRS)
    made = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=0.01))
    inputs = {"margin": margin, "attention_mask": torch.ones(1)}
    theirs = made.compute_loss(lambda **_: SimpleNamespace(logits=logits), inputs)
    ours = reward_loss(*logits[:, 0].chunk(2), margin, centering=0.01)
    assert_same(ours.loss, theirs, logits)


def test_scores_of_packed_documents_are_split_into_rows():
    lengths, bounds = [4, 1, 6], torch.tensor([0, 4, 5, 11])
    for total in (11, 10):  # for shift_labels, and for labels
        scores = torch.randn(1, total, requires_grad=True)
        found = rows_of_documents(scores, bounds)
        assert found.shape == (3, 6 if total == 11 else 5)
        for row, start, length in zip(found, bounds, lengths, strict=False):
            own = scores[0, start : start + length]
            assert torch.equal(row[: len(own)], own)
            assert not row[len(own) :].any()
    with pytest.raises(ValueError, match="the documents' number"):
        rows_of_documents(torch.zeros(1, 9), bounds)


def uneven_mean(loss, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a loss of seven items at once, and as the mean over two processes with two and five of them."""
    parts = zip(*(column.split([2, 5]) for column in columns), strict=True)
    return loss(*columns, None), sum(loss(*part, 7 / 2) for part in parts) / 2


LOSSES = {
    "dpo": lambda a, b, c, d, n: dpo_loss(a, b, c, d, num_items=n).loss,
    "dpo with sft": lambda a, b, c, d, n: (
        dpo_loss(
            a, b, c, d, loss_type={"hinge": 0.5, "sft": 2.0}, nll=-a.sum() / (n or len(a)), num_items=n
        ).loss
    ),
    "orpo": lambda a, b, c, d, n: orpo_loss(a - 1, b - 1, torch.zeros(()), num_items=n).loss,
    "cpo": lambda a, b, c, d, n: cpo_loss(a, b, num_items=n).loss,
    "simpo": lambda a, b, c, d, n: simpo_loss(a, b, num_items=n).loss,
    "kto": lambda a, b, c, d, n: kto_loss(a, b, c > d, torch.tensor(0.3), num_items=n).loss,
    "reward": lambda a, b, c, d, n: reward_loss(a, b, c, centering=0.1, num_items=n).loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_uneven_parts_of_a_step_give_its_mean(name, assert_same):
    columns = -torch.rand(4, 7)
    columns.requires_grad_()
    assert_same(*uneven_mean(LOSSES[name], *columns), columns)


def test_packed_and_single_pairs_train_like_padded_ones():
    """DPO through a model: on padded rows, on the same pairs packed, and one pair at a time."""
    model = liger_models.from_config(find_architecture("gemma2").tiny).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    lengths, ids = [9, 6, 4, 7], torch.randint(3, 100, (4, 9))
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill((mask == 0) | (torch.arange(9) < 3), -100)
    reference = -20 * torch.rand(4).double()

    def gradients(*losses):
        model.zero_grad()
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    def dpo(sums, rows, **options):
        return dpo_loss(*sums.chunk(2), *reference[rows].chunk(2), **options).loss

    def padded(rows, **options):
        scores = model.score(ids[rows], labels[rows], attention_mask=mask[rows])
        return dpo(sequence_log_probs(scores.log_probs), rows, **options)

    every = [0, 1, 2, 3]
    expected = gradients(padded(every))
    parts = gradients(*(padded([i, i + 2], num_items=2) for i in range(2)))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    row, targets = (t[mask.bool()][None] for t in (ids, labels))
    scores = model.score(row, targets, cu_seqlens=bounds)
    packed = gradients(dpo(sequence_log_probs(rows_of_documents(scores.log_probs, bounds)), every))
    for other in (parts, packed):
        for a, b in zip(other, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_dpo_follows_its_formula():
    a, b, c, d = -torch.rand(4, 5).double()
    expected = -torch.log(1 / (1 + torch.exp(-0.2 * ((a - c) - (b - d))))).mean()
    assert math.isclose(dpo_loss(a, b, c, d, beta=0.2).loss, expected, rel_tol=1e-12)
