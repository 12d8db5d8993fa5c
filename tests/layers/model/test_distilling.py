"""Distillation from a teacher in the same process, against the logits of both at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from randomised import randomise
from score_calls import CALLS, Wrapped

from liger_models.convert.errors import DataError
from liger_models.layers.model import distilling
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.model.distilling import Distillation

BATCH, SEQ = 3, 9


def built(spec, **changes):
    return randomise(CausalLM(replace(spec, **changes)).double())


@pytest.fixture
def pair(make_model):
    """A student and a teacher of another depth, with heads of two forms."""
    torch.manual_seed(0)
    student = built(make_model(2).spec, head_bias=True, logit_softcap=4.0)
    return student, built(make_model(3).spec, logit_scale=1.3)


def batch(student):
    ids = torch.randint(student.spec.vocab_size, (BATCH, SEQ))
    return ids, ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)


def jsd(student, teacher, beta):
    """Each row's divergence, of log-probabilities."""
    q, p = student.exp(), teacher.exp()
    if beta == 0:
        return (p * (teacher - student)).sum(-1)
    if beta == 1:
        return (q * (student - teacher)).sum(-1)
    mixture = (beta * p + (1 - beta) * q).log()
    return beta * (p * (teacher - mixture)).sum(-1) + (1 - beta) * (q * (student - mixture)).sum(-1)


def top(student, teacher, k, beta):
    """The same over the teacher's k likeliest tokens and the rest."""
    chosen = teacher.topk(k, -1).indices
    rows = [x.gather(-1, chosen) for x in (student, teacher)]
    rows = [torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in rows]
    return jsd(*rows, beta)


LESSONS = {
    "forward": (
        {"temperature": 1.7},
        lambda s, t: jsd((s / 1.7).log_softmax(-1), (t / 1.7).log_softmax(-1), 0),
    ),
    "reverse": ({"beta": 1.0}, lambda s, t: jsd(s.log_softmax(-1), t.log_softmax(-1), 1)),
    "jsd": ({"beta": 0.3}, lambda s, t: jsd(s.log_softmax(-1), t.log_softmax(-1), 0.3)),
    "cosine": ({"divergence": "cosine"}, lambda s, t: 1 - F.cosine_similarity(s, t, dim=-1)),
    "top": ({"top_k": 5}, lambda s, t: top(s.log_softmax(-1), t.log_softmax(-1), 5, 0)),
    "top of jsd": ({"top_k": 5, "beta": 0.3}, lambda s, t: top(s.log_softmax(-1), t.log_softmax(-1), 5, 0.3)),
}


@pytest.mark.parametrize(
    ("name", "wrapped", "call"),
    [
        pytest.param(name, wrapped, call, id=f"{name}-{'wrapped' if wrapped else 'plain'}-{kind}")
        for i, name in enumerate(LESSONS)
        for j, (kind, call) in enumerate(CALLS.items())
        for wrapped in [bool((i + j) % 2)]  # every pair of two of them
    ],
)
def test_the_loss_and_its_gradients_match_all_logits(name, wrapped, call, pair, monkeypatch):
    monkeypatch.setattr(distilling, "_CHUNK", 4)
    student, teacher = pair
    ids, labels = batch(student)
    if wrapped:
        student.lm_head = Wrapped(student.lm_head).double()
    options, divergence = LESSONS[name]
    found = student.distill(teacher, ids, labels, weight=0.7, hard_weight=0.2, **options, **call)
    nll = student(ids, labels=labels, **call).loss

    counted = labels[:, 1:] != -100
    if "attention_mask" in call:
        mask = call["attention_mask"].bool()
        counted &= mask[:, 1:] & mask[:, :-1]
    if "position_ids" in call:
        counted &= call["position_ids"][:, 1:] != 0
    rows = [model(ids, **call).logits[:, :-1][counted].double() for model in pair]
    expected = divergence(rows[0], rows[1].detach()).mean()
    # Logits in chunks are float32, with roundings of 6e-8 of numbers up to ten.
    exact = {"rtol": 1e-5, "atol": 1e-6} if wrapped or "top" in name else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found.divergence.double(), expected, **exact)
    torch.testing.assert_close(found.hard_loss, nll, **exact)
    gradients = []
    for loss in (found.loss, 0.7 * expected + 0.2 * nll):
        student.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in student.parameters()])
    for ours, true in zip(*gradients, strict=True):
        assert (ours - true).norm() <= (1e-5 if exact["rtol"] == 1e-5 else 1e-9) * true.norm() + 1e-12
    assert all(p.grad is None for p in teacher.parameters())
    assert teacher.training


def test_a_step_in_parts_divides_by_the_labels_of_all(pair):
    student, teacher = pair
    ids, labels = batch(student)
    whole = student.distill(teacher, ids, labels, hard_weight=0.5).loss
    count = (labels[:, 1:] != -100).sum()
    parts = [
        student.distill(teacher, ids[row], labels[row], hard_weight=0.5, num_items_in_batch=count).loss
        for row in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_another_vocabulary_is_refused(pair, make_model):
    student, _ = pair
    ids, labels = batch(student)
    other = built(make_model(2).spec, vocab_size=student.spec.vocab_size + 3)
    with pytest.raises(DataError, match="has 61 tokens and the teacher's 64"):
        student.distill(other, ids, labels)


def test_a_teacher_of_another_library_is_refused(pair):
    ids, labels = batch(pair[0])
    with pytest.raises(DataError, match="the teacher is a Linear; expected a model of liger_models"):
        pair[0].distill(torch.nn.Linear(2, 2), ids, labels)


def test_batches_without_a_lesson_are_refused(pair):
    student, teacher = pair
    ids, labels = batch(student)
    with pytest.raises(DataError, match="over labels"):
        student.distill(teacher, ids)
    with pytest.raises(DataError, match="pass input_ids"):
        student(inputs_embeds=student.embed_tokens(ids), labels=labels, distill=Distillation(teacher))
    for options, message in (
        ({"divergence": "kl"}, "expected 'jsd'"),
        ({"divergence": "cosine", "temperature": 2.0}, "no beta"),
        ({"beta": 1.5}, "from 0"),
        ({"top_k": 0}, "1 or more"),
        ({"top_k": 3, "temperature": -1.0}, "temperature is -1.0; expected a positive"),
    ):
        with pytest.raises(ValueError, match=message):
            Distillation(teacher, **options)


def test_trls_divergence_of_hidden_states_equals_ours(pair):
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    student, teacher = (model.float() for model in pair)
    ids, labels = batch(student)
    mask = F.pad(labels[:, 1:] != -100, (0, 1))

    states = {}
    for model in pair:
        model.lm_head.register_forward_pre_hook(lambda head, args: states.update({head: args[0].detach()}))
    for beta in (0.0, 0.4, 1.0):
        ours = student.distill(teacher, ids, labels, beta=beta, temperature=1.5).loss
        heads = student.lm_head.weight, teacher.lm_head.weight
        theirs, *_ = _chunked_divergence_loss(
            *(states[model.lm_head].unflatten(0, (BATCH, SEQ)) for model in pair),
            *heads,
            mask,
            beta,
            student_lm_head_bias=student.lm_head.bias,
            teacher_logit_scale=1.3,
            student_final_logit_softcapping=4.0,
            temperature=1.5,
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        own, true = (torch.autograd.grad(x, [*student.lm_head.parameters()]) for x in (ours, theirs))
        for a, b in zip(own, true, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_likeliest_tokens_and_the_rest_are_compared_as_trl_does(beta):
    pytest.importorskip("trl", reason="trl is not installed")
    module = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    logits, teacher = torch.randn(6, 40, requires_grad=True), torch.randn(6, 40)
    log_p, tokens = teacher.log_softmax(-1).topk(7, -1)
    there = torch.ones_like(tokens, dtype=torch.bool)
    rows = [module._add_tail_bucket(x, there) for x in (logits.log_softmax(-1).gather(-1, tokens), log_p)]
    theirs = module._jsd_divergence(rows[0][0], rows[1][0], beta, rows[0][1]).sum(-1)
    ours = distilling.top_k_divergence(logits, log_p, tokens, beta)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    own, true = (torch.autograd.grad(x.sin().sum(), logits, retain_graph=True)[0] for x in (ours, theirs))
    torch.testing.assert_close(own, true, rtol=1e-4, atol=1e-6)
