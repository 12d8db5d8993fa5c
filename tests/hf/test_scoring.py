"""`model.score` of our transformers models equals TRL's fused head on transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_pairs import BOUND, relative_distance
from randomised import randomise_trained

import liger_models
from liger_models.kernels.losses.log_probs import log_probs_plain
from liger_models.losses import reference_log_probs

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl", reason="trl is not installed")

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
WANTED = {"entropy": True, "log_sum_sq_probs": True, "top1": True}


def adapt(model, targets=("q_proj", "down_proj")):
    config = peft.LoraConfig(
        r=3, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return randomise_trained(peft.get_peft_model(model, config))


# Families whose logits are capped, scaled, and neither.
@pytest.mark.parametrize("family", ["gemma2", "granite", "llama"])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "LoRA"])
def test_scores_match_trls_head(family, adapted, make_both, batch):
    from trl.trainer.utils import add_fused_lm_head

    both = make_both(family, projections="split")
    ours, theirs = both.ours, copy.deepcopy(both.reference)
    add_fused_lm_head(theirs, temperature=0.7, outputs=OUTPUTS)
    if adapted:
        ours, theirs = adapt(ours), adapt(theirs)
    expected = theirs(**batch, fused_lm_head=True)
    found = ours.score(**batch, temperature=0.7, **WANTED)
    for name in OUTPUTS[:3]:
        assert relative_distance(found[name], expected[name]) <= BOUND, name
    assert torch.equal(found.is_top1, expected.is_top1.bool())
    for scores in (expected, found):
        (scores.log_probs.sin() + scores.entropy**2).sum().backward()
    own = dict(ours.named_parameters())
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None and name in own}
    assert gradients
    for name, gradient in gradients.items():
        assert relative_distance(own[name].grad, gradient) <= BOUND, name


def test_an_adapter_of_the_head_affects_the_scores(make_both, batch):  # TRL's fused head ignores it
    ours = adapt(make_both("gemma2", projections="split").ours, ["q_proj", "lm_head"])
    scores = ours.score(**batch, temperature=0.7, **WANTED)
    logits = ours(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    truth = log_probs_plain(logits, batch["labels"][:, 1:], temperature=0.7)
    for name in OUTPUTS[:3]:
        assert relative_distance(scores[name], getattr(truth, name)) <= BOUND, name
    (head,) = (p for name, p in ours.named_parameters() if "lm_head.lora_B" in name)
    (gradient,) = torch.autograd.grad(scores.log_probs.sin().sum(), head)
    assert relative_distance(gradient, torch.autograd.grad(truth.log_probs.sin().sum(), head)[0]) <= BOUND


def test_cached_reference_scores_depend_on_its_config(make_both, batch, tmp_path):
    ours = make_both("llama").ours
    other = type(ours).from_pretrained(ours.name_or_path, rms_norm_eps=0.5)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), other.parameters(), strict=True))
    for model in (ours, other):
        (kept,) = reference_log_probs(model, [batch], tmp_path / "reference.safetensors")
        assert torch.equal(kept, reference_log_probs(model, [batch])[0])


def test_scores_include_the_router_loss(make_both, batch):
    ours = make_both("qwen3_moe").ours
    ours.config.output_router_logits = True
    ours.config.router_aux_loss_coef = 0.7
    shifted = torch.roll(batch["labels"], -1, 1)
    inputs = {**batch, "labels": None, "shift_labels": shifted}
    scores = ours.score(**inputs)
    count = (scores.log_probs != 0).sum()
    whole = ours(**inputs).loss
    torch.testing.assert_close(scores.router_loss - scores.log_probs.sum() / count, whole)


def test_student_and_teacher_may_each_be_native_or_in_transformers(make_both, batch):
    """Student and teacher may each be a native or a transformers model; the numbers are the same."""
    hf = make_both("llama").ours
    student = liger_models.from_pretrained(hf.name_or_path)
    teachers = []
    with torch.no_grad():
        for teacher in (copy.deepcopy(hf), liger_models.from_pretrained(hf.name_or_path)):
            for name, p in sorted(teacher.named_parameters()):
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
            teachers.append(teacher)
    losses = []
    for pupil in (student, hf):
        for teacher in teachers:
            found = pupil.distill(teacher, **batch, beta=0.3, hard_weight=0.4)
            losses.append(found.loss)
            assert found.divergence > 1e-3
            assert found.hard_loss > 0
    own = student.distill(hf, **batch)
    assert abs(own.loss) < 1e-6  # a student that equals its teacher has no loss
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[1], losses[3], rtol=1e-5, atol=1e-6)
