"""`model.score`: per-token scores without logits, against all logits at once."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from score_calls import CALLS, Wrapped
from torch import nn

from liger_models.convert.errors import DataError
from liger_models.kernels.losses.log_probs import log_probs_plain
from liger_models.layers.model import head as head_module
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.model.scoring import ScoreOptions

RANK = Path(__file__).with_name("score_rank.py")
EVERYTHING = {"entropy": True, "top1": True, "log_sum_sq_probs": True, "temperature": 0.7}
BATCH, SEQ = 3, 9


@pytest.fixture
def model(make_model):
    """With all that can become of a head's product."""
    plain = make_model()
    spec = replace(plain.spec, head_bias=True, logit_scale=1.7, logit_softcap=4.0)
    model = CausalLM(spec)
    model.load_state_dict({**plain.state_dict(), "lm_head.bias": torch.randn(spec.vocab_size)})
    return model


def batch(model):
    ids = torch.randint(model.spec.vocab_size, (BATCH, SEQ))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return ids, labels


def expected(model, ids, labels, shifted, call):
    """The scores from the model's own logits, and which places have a label."""
    logits = model(ids, **call).logits
    mask = call.get("attention_mask", torch.ones_like(ids)).bool()
    if shifted:
        targets = labels.masked_fill(~mask, -100)
    else:
        targets = labels[:, 1:].masked_fill(~(mask[:, 1:] & mask[:, :-1]), -100)
        if "position_ids" in call:
            targets = targets.masked_fill(call["position_ids"][:, 1:] == 0, -100)
        logits = logits[:, :-1]
    return log_probs_plain(logits, targets, temperature=0.7), targets != -100


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_scores_and_their_gradients_match_all_logits(call, shifted, model):
    model = model.double()
    ids, labels = batch(model)
    given = {"shift_labels": labels} if shifted else {"labels": labels}
    scores = model.score(ids, **given, **call, **EVERYTHING)
    truth, counted = expected(model, ids, labels, shifted, call)
    assert scores.log_probs.shape == (BATCH, SEQ if shifted else SEQ - 1)
    for name in ("log_probs", "entropy", "is_top1", "log_sum_sq_probs"):
        torch.testing.assert_close(scores[name], getattr(truth, name), msg=name)
        assert not scores[name][~counted].any()
    gradients = []
    for found in (scores, truth):
        model.zero_grad()
        (found.log_probs.sin() + found.entropy**2).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)


def test_scores_are_float32_in_half_precision_too(model):
    ids, labels = batch(model)
    truth = model.score(ids, labels, entropy=True)
    scores = model.bfloat16().score(ids, labels, entropy=True)
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    # Logits of up to 4 in bfloat16, after several roundings of the hidden states.
    torch.testing.assert_close(scores.log_probs, truth.log_probs, rtol=0, atol=0.3)


def test_packed_documents_are_scored_separately(model):
    ids, labels = (t.flatten()[None] for t in batch(model))
    bounds = torch.tensor([0, 5, 6, 27])
    packed = model.score(ids, labels, cu_seqlens=bounds).log_probs
    for start, end in ((0, 5), (6, 27)):
        alone = model.score(ids[:, start:end], labels[:, start:end]).log_probs
        # Attention sums over different blocks of keys.
        torch.testing.assert_close(packed[:, start : end - 1], alone, rtol=1e-5, atol=1e-5)
    assert not packed[:, [4, 5]].any()  # the first token of a document is not scored


@pytest.mark.parametrize("known", [False, True], ids=["scores", "weighted sum"])
def test_a_wrapped_head_scores_in_chunks(known, model, monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK", 5)
    ids, labels = batch(model)
    model.lm_head = Wrapped(model.lm_head)
    coefficients = torch.randn(BATCH, SEQ - 1)
    options = {"coefficients": coefficients} if known else {}
    scores = model.score(ids, labels, **EVERYTHING, **options)
    truth, _ = expected(model, ids, labels, False, {})
    for name in ("log_probs", "entropy", "is_top1", "log_sum_sq_probs"):
        torch.testing.assert_close(scores[name], getattr(truth, name), rtol=1e-5, atol=1e-5, msg=name)
    gradients = []
    for found in (scores, truth):
        model.zero_grad()
        loss = (coefficients * found.log_probs).sum() if found is truth or not known else found.weighted_sum
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for ours, true in zip(*gradients, strict=True):
        assert (ours - true).norm() <= 1e-5 * true.norm()
    assert scores.log_probs.requires_grad is not known


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_known_coefficients_compute_gradients_in_the_forward_pass(shifted, wrapped, model):
    model = model.double()
    ids, labels = batch(model)
    if wrapped:
        model.lm_head = Wrapped(model.lm_head).double()
    given = {"shift_labels": labels} if shifted else {"labels": labels}
    given["attention_mask"] = CALLS["padded"]["attention_mask"]
    coefficients = torch.randn(BATCH, SEQ if shifted else SEQ - 1, dtype=torch.double)
    gradients = []
    for known in (True, False):
        model.zero_grad()
        scores = model.score(ids, **given, **({"coefficients": coefficients} if known else {}))
        loss = scores.weighted_sum if known else (coefficients * scores.log_probs).sum()
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_batch_without_labels_has_zero_scores_and_zero_gradients(wrapped, model):
    ids, labels = batch(model)
    if wrapped:
        model.lm_head = Wrapped(model.lm_head)
    scores = model.score(ids, torch.full_like(labels, -100), **EVERYTHING)
    assert not any(score.any() for score in scores.values())
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_scores_include_the_router_loss(make_model, moe_spec):
    spec = make_model().spec
    blocks = tuple(replace(block, mlp=moe_spec) for block in spec.blocks)
    model = CausalLM(replace(spec, blocks=blocks))
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    ids = torch.randint(spec.vocab_size, (BATCH, SEQ))
    scores = model.score(ids, ids)
    whole = model(ids, labels=ids).loss
    torch.testing.assert_close(scores.router_loss - scores.log_probs.mean(), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "pass labels or shift_labels"),
        ({"coefficients": torch.zeros(BATCH, SEQ)}, r"shape of the scores, \(3, 8\)"),
        ({"num_items_in_batch": 4}, "score cannot be combined"),
        ({"return_logits": True}, "score cannot be combined"),
        ({"cu_seqlens": torch.tensor([0, 27])}, "all documents in one row"),
        ({"labels": torch.full((BATCH, SEQ), 10**6)}, "outside the vocabulary"),
    ],
)
def test_unscorable_inputs_are_refused(change, message, model):
    ids, labels = batch(model)
    with pytest.raises(DataError, match=message):
        model.score(**({"input_ids": ids, "labels": labels} | change))


@pytest.mark.parametrize("known", [False, True], ids=["scores", "weighted sum"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("shape", [(), (BATCH,), (BATCH, SEQ - 1)], ids=str)
def test_each_row_or_token_may_have_its_temperature(shape, wrapped, known, model, monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK", 5)
    model = model.double()
    ids, labels = batch(model)
    mask = CALLS["padded"]["attention_mask"]
    if wrapped:
        model.lm_head = Wrapped(model.lm_head).double()
    temperature = 0.5 + torch.rand(shape, dtype=torch.double)
    each = temperature.view(*shape, *[1] * (2 - len(shape))).expand(BATCH, SEQ - 1)
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    targets = labels[:, 1:].masked_fill(~(mask[:, 1:] & mask[:, :-1]).bool(), -100)
    truth = log_probs_plain(logits / each.unsqueeze(-1), targets)
    coefficients = torch.randn(BATCH, SEQ - 1, dtype=torch.double)
    options = EVERYTHING | ({"coefficients": coefficients} if known else {}) | {"temperature": temperature}
    scores = model.score(ids, labels, attention_mask=mask, **options)
    for name in ("log_probs", "entropy", "is_top1", "log_sum_sq_probs"):
        torch.testing.assert_close(scores[name], getattr(truth, name), msg=name)
    gradients = []
    for found in (truth, scores):
        model.zero_grad()
        if known:
            loss = scores.weighted_sum if found is scores else (coefficients * found.log_probs).sum()
        else:
            loss = (coefficients * found.log_probs).sum() + (found.entropy**2).sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [
        (torch.ones(BATCH + 1), DataError, r"one per row, \(3,\), .* \(3, 8\); found \(4,\)"),
        (torch.tensor([1.0, 0.0, 2.0]), ValueError, "has the value 0.0; expected positive"),
        (torch.tensor(0.5, requires_grad=True), TypeError, r"requires a gradient, .*temperature\.detach\(\)"),
    ],
    ids=["shape", "zero", "learned"],
)
def test_temperatures_that_do_not_fit_are_refused(temperature, error, message, model):
    ids, labels = batch(model)
    with pytest.raises(error, match=message):
        model.score(ids, labels, temperature=temperature)
    if error is not DataError:
        with pytest.raises(error, match=message):
            ScoreOptions(temperature=temperature)


def test_options_may_also_be_passed_to_forward(model):
    ids, labels = batch(model)
    assert torch.equal(
        model(ids, labels=labels, score=ScoreOptions(temperature=0.5)).log_probs,
        model.score(ids, labels, temperature=0.5).log_probs,
    )


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_compute_the_mean_of_the_gradients(model, tmp_path):
    ids = torch.randint(model.spec.vocab_size, (4, SEQ))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    labels[2] = -100  # uneven counts
    coefficients = torch.randn(4, SEQ - 1)
    task = {"input_ids": ids, "labels": labels, "coefficients": coefficients}
    state = {name: p.clone() for name, p in model.state_dict().items()}
    teacher = CausalLM(model.spec)
    teacher.load_state_dict({name: p + 0.1 * torch.randn_like(p) for name, p in state.items()})
    task = {"spec": model.spec, "state": state, "teacher": teacher.state_dict(), "batch": task}
    task["added"] = torch.randn(model.spec.hidden_size, model.spec.vocab_size) / 9
    torch.save(task, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path)

    scores = model.score(ids, labels, entropy=True)
    loss = runpy.run_path(str(RANK))["loss_of"](scores) + (coefficients * scores.log_probs).sum()
    (loss / 2).backward()  # gradients are averaged over ranks
    of_scores = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.distill(teacher, ids, labels, beta=0.3, hard_weight=0.2, num_items_in_batch=40).loss.backward()
    taught = {name: p.grad for name, p in model.named_parameters()}
    for one in (model, teacher):
        one.zero_grad()
        one.lm_head = Wrapped(one.lm_head)
        one.lm_head.added.data = task["added"]
    (runpy.run_path(str(RANK))["loss_of"](model.score(ids, labels, entropy=True)) / 2).backward()
    model(ids, labels=labels, num_items_in_batch=40).loss.backward()
    for top_k in (4, None):
        options = {"top_k": top_k, "beta": 0.3, "num_items_in_batch": 40}
        model.distill(teacher, ids, labels, **options).loss.backward()
    pieces = {name: p.grad for name, p in model.named_parameters()}
    for rank, results in enumerate(found):
        assert "call the wrapper" in results["refusal"]
        wanted = {"ddp": of_scores, "fsdp": of_scores, "taught": taught, "taught, ddp": taught}
        wanted["pieces"] = pieces
        for wrapper, expected in wanted.items():
            for name, gradient in expected.items():
                distance = (results[wrapper][name] - gradient).norm()
                assert distance <= 1e-5 * gradient.norm(), (wrapper, name)
        # Means and quantiles are over the eight numbers of both ranks, three and five.
        assert results["kl"] == (3 * 1 + 5 * 2) / 8
        assert results["top"] == (1, 3)[rank]  # those of 0 0 1 1 2 2 3 4 above 1.2
        # Under a policy that casts the inputs of layers, coefficients and scores stay float32.
        assert results["dtypes"] == (torch.float32, torch.float32)
        assert "log_probs would be rounded to torch.bfloat16" in results["rounding"]
        weighted, summed = results["weighted"]
        assert abs(weighted - summed) <= 1e-5 * abs(summed)
