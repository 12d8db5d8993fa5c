"""The losses between a student and a teacher, as modules, are their formulas, with the arguments in order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import liger_models.kernels as kernels
from liger_models.layers import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerJSDLoss,
    LigerKLDivLoss,
    LigerTVDLoss,
)

TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN = 9, 13, 5, 7
TEMPERATURE = 1.7


def kl(a, b):
    return F.kl_div(b, a, reduction="none", log_target=True).sum(-1)


def forward_kl(student, teacher):
    return kl(teacher, student)


def jsd(beta):
    def formula(student, teacher):
        mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
        return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)

    return formula


def total_variation(student, teacher):
    return (student.exp() - teacher.exp()).abs().sum(-1) / 2


def of_distributions(formula, temperature=TEMPERATURE):
    """The formula of two log-distributions, as one of logits."""
    return lambda student, teacher: formula(
        (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    )


def cosine_distance(student, teacher):
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


T = {"temperature": TEMPERATURE}
OF_LOGITS = {
    "kl": (LigerKLDivLoss, T, of_distributions(forward_kl), kernels.kl_div),
    "jsd": (LigerJSDLoss, T | {"beta": 0.2}, of_distributions(jsd(0.2)), kernels.generalized_jsd),
    "jsd by default": (LigerJSDLoss, {}, of_distributions(jsd(0.5), 1.0), kernels.generalized_jsd),
    "tvd": (LigerTVDLoss, T, of_distributions(total_variation), kernels.total_variation),
}
OF_LAYERS = {
    "kl": (LigerFusedLinearKLDivLoss, T, of_distributions(forward_kl), kernels.linear_kl),
    "jsd": (LigerFusedLinearJSDLoss, T | {"beta": 0.2}, of_distributions(jsd(0.2)), kernels.linear_jsd),
    "cosine": (LigerFusedLinearCosineSimilarityLoss, {}, cosine_distance, kernels.linear_cosine_distillation),
}
LOSSES = [LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss]
LOSSES += [loss for loss, *_ in (*OF_LOGITS.values(), *OF_LAYERS.values())]

of_logits = pytest.mark.parametrize(
    ("module", "options", "formula", "function"), OF_LOGITS.values(), ids=OF_LOGITS
)
of_layers = pytest.mark.parametrize(
    ("module", "options", "formula", "function"), OF_LAYERS.values(), ids=OF_LAYERS
)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def labels_with_gaps():
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[::3] = -100
    return labels


def reduced(losses, labels, reduction):
    if labels is not None:
        losses = losses.where(labels != -100, 0.0)
    if reduction == "none":
        return losses
    count = 1 if reduction == "sum" else len(losses) if labels is None else (labels != -100).sum()
    return losses.sum() / count


def assert_same(found, expected, operands):
    """Values and the gradients of the operands agree, in float64."""
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(found, operands, upstream),
        torch.autograd.grad(expected, operands, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@of_logits
@every_reduction
@pytest.mark.parametrize("labelled", [True, False])
def test_a_divergence_of_logits(module, options, formula, function, reduction, labelled):
    student, teacher = random(TOKENS, VOCAB), random(TOKENS, VOCAB)
    labels = labels_with_gaps() if labelled else None
    found = module(reduction=reduction, **options)(student, teacher, labels)
    assert_same(found, reduced(formula(student, teacher.detach()), labels, reduction), [student])
    assert torch.autograd.grad(found.sum(), teacher, allow_unused=True) == (None,)


@of_layers
@every_reduction
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_divergence_of_linear_layers(module, options, formula, function, reduction, labelled, biased):
    student = [random(TOKENS, HIDDEN), random(VOCAB, HIDDEN)]
    teacher = [random(TOKENS, TEACHER_HIDDEN), random(VOCAB, TEACHER_HIDDEN)]
    biases = [random(VOCAB), random(VOCAB)] if biased else [None, None]
    labels = labels_with_gaps() if labelled else None
    found = module(reduction=reduction, **options)(*student, *teacher, labels, *biases)
    with torch.no_grad():
        teacher_logits = F.linear(*teacher, biases[1])
    expected = reduced(formula(F.linear(*student, biases[0]), teacher_logits), labels, reduction)
    assert_same(found, expected, student + biases[:1] * biased)


@of_logits
def test_a_module_of_logits_equals_its_function(module, options, formula, function):
    student, teacher, labels = torch.randn(TOKENS, VOCAB), torch.randn(TOKENS, VOCAB), labels_with_gaps()
    loss = module(ignore_index=3, **options)(student, teacher, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, function(student, teacher, labels=labels, ignore_index=3, **options))
    assert not torch.equal(loss, module(**options)(student, teacher, labels))


@of_layers
def test_a_module_of_linear_layers_equals_its_function(module, options, formula, function):
    operands = [torch.randn(size, HIDDEN) for size in (TOKENS, VOCAB, TOKENS, VOCAB)]
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[:4] = 3
    loss = module(ignore_index=3, **options)(*operands, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, function(*operands, labels, ignore_index=3, **options))
    assert not torch.equal(loss, module(**options)(*operands, labels))


def test_kl_matches_torch_on_log_probabilities():
    student, teacher = random(TOKENS, VOCAB), torch.randn(TOKENS, VOCAB, dtype=torch.float64).log_softmax(-1)
    expected = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)(student.log_softmax(-1), teacher)
    assert_same(LigerKLDivLoss()(student.log_softmax(-1), teacher), expected, [student])


@pytest.mark.parametrize("module", LOSSES)
def test_options_are_checked_where_they_are_given(module):
    with pytest.raises(TypeError, match="unexpected keyword argument 'log_target'"):
        module(log_target=True)
    with pytest.raises(TypeError, match="positional argument"):
        module(0.1)  # libraries order their parameters differently
    assert "reduction='sum', ignore_index=-1" in repr(module(reduction="sum", ignore_index=-1))


def test_incompatible_inputs_raise_the_functions_own_errors():
    logits = torch.randn(TOKENS, VOCAB)
    with pytest.raises(ValueError, match="reduction is 'batchmean'; expected 'none', 'mean' or 'sum'"):
        LigerKLDivLoss(reduction="batchmean")(logits, logits)
    with pytest.raises(ValueError, match="over one vocabulary"):
        LigerTVDLoss()(logits, logits[:, 1:])
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        LigerJSDLoss(beta=1.5)(logits, logits)
    with pytest.raises(ValueError, match="labels have shape"):
        LigerJSDLoss()(logits, logits, torch.zeros(3, dtype=torch.long))
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    with pytest.raises(ValueError, match="one vocabulary"):
        LigerFusedLinearKLDivLoss()(x, weight, x, weight[1:])
    # A target distribution in place of the teacher's hidden states, and labels in place of its weight.
    with pytest.raises((ValueError, TypeError)):
        LigerFusedLinearKLDivLoss()(x, weight, logits.softmax(-1), labels_with_gaps())
