"""Distillation losses in chunks of tokens, against autograd through all logits in float64."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import generalized_jsd, kl_div, linear_cosine_distillation, linear_jsd, linear_kl

module = importlib.import_module("liger_models.kernels.losses.linear_divergence")
cosine = importlib.import_module("liger_models.kernels.losses._cosine_rows")
chunks = importlib.import_module("liger_models.kernels.losses._linear_chunks")
H, TEACHER_H, V = 8, 5, 37


SCALING = {"softcap": 2.5, "logit_scale": 1.4, "teacher_softcap": 4.0, "teacher_logit_scale": -0.6}


def capped_cosine_distance(student, teacher, labels, reduction="mean"):
    student, teacher = 2.5 * torch.tanh(1.4 * student / 2.5), 4.0 * torch.tanh(-0.6 * teacher / 4.0)
    return cosine_distance(student, teacher, labels, reduction)


def cosine_distance(student, teacher, labels, reduction="mean"):
    """Cosine distance from all logits at once; the mean is over the tokens with a label."""
    losses = 1 - F.cosine_similarity(student, teacher.to(student.dtype), dim=-1)
    losses = losses.where(labels != -100, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (labels != -100).sum()


DISTILLATIONS = {  # (in chunks, from all logits)
    "forward KL": (
        lambda *operands, **options: linear_kl(*operands, temperature=2.0, **options),
        lambda s, t, y, **options: kl_div(s, t, temperature=2.0, labels=y, **options),
    ),
    "JSD": (
        lambda *operands, **options: linear_jsd(*operands, beta=0.3, temperature=0.8, **options),
        lambda s, t, y, **options: generalized_jsd(s, t, beta=0.3, temperature=0.8, labels=y, **options),
    ),
    "cosine": (linear_cosine_distillation, cosine_distance),
    "capped forward KL": (
        lambda *operands, **options: linear_kl(*operands, temperature=2.0, **SCALING, **options),
        lambda s, t, y, **options: kl_div(s, t, temperature=2.0, labels=y, **SCALING, **options),
    ),
    "capped JSD": (
        lambda *operands, **options: linear_jsd(*operands, temperature=0.8, **SCALING, **options),
        lambda s, t, y, **options: generalized_jsd(s, t, temperature=0.8, labels=y, **SCALING, **options),
    ),
    "capped cosine": (
        lambda *operands, **options: linear_cosine_distillation(*operands, **SCALING, **options),
        capped_cosine_distance,
    ),
}
every_distillation = pytest.mark.parametrize(
    ("in_chunks", "at_once"), DISTILLATIONS.values(), ids=DISTILLATIONS
)


def problem(tokens=7, dtype=torch.float32, ignored=(1, 4), device="cpu", hidden=H, vocab=V):
    """x, weight and bias of the student, which require gradients; the teacher's; labels, some being -100."""

    def layer(hidden):
        x = torch.randn(tokens, hidden, device=device)
        weight = torch.randn(vocab, hidden, device=device) * (2 * hidden**-0.5)
        return [t.to(dtype) for t in (x, weight, torch.randn(vocab, device=device))]

    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels[list(ignored)] = -100
    return [t.requires_grad_() for t in layer(hidden)], layer(hidden * 5 // 8), labels


def in_float64(student, teacher):
    return [t.detach().double().requires_grad_() for t in student], [t.double() for t in teacher]


def run(in_chunks, student, teacher, labels, **options):
    loss = in_chunks(*student[:2], *teacher[:2], labels, student[2], teacher[2], **options)
    return loss_and_grads(loss, student)


def run_at_once(at_once, student, teacher, labels, **options):
    return loss_and_grads(at_once(F.linear(*student), F.linear(*teacher), labels, **options), student)


def loss_and_grads(loss, student):
    upstream = torch.linspace(0.5, 2.0, loss.numel(), device=loss.device).to(loss.dtype).reshape(loss.shape)
    return loss, *torch.autograd.grad(loss, student, upstream)


def chunks_of(monkeypatch, size):
    monkeypatch.setattr(chunks, "_chunk_size", lambda rows, *_: size)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@every_distillation
def test_chunked_gradients_are_the_true_ones(monkeypatch, implementation, in_chunks, at_once, reduction):
    chunks_of(monkeypatch, 2)  # five tokens with a label: chunks of two, two and one
    monkeypatch.setattr(cosine, "_COSINE_BLOCK", 16)
    student, teacher, labels = problem()
    ours = run(in_chunks, student, teacher, labels, reduction=reduction)
    truth = run_at_once(at_once, *in_float64(student, teacher), labels, reduction=reduction)
    assert ours[0].dtype == torch.float32
    for a, true in zip(ours, truth, strict=True):
        # Logits are below 20, with a few roundings each, which exp turns into relative errors.
        atol = 16 * 20 * torch.finfo(torch.float32).eps * true.abs().max().item()
        torch.testing.assert_close(a.double(), true, rtol=0, atol=atol)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@every_distillation
def test_chunks_make_no_difference_in_float64(monkeypatch, in_chunks, at_once, reduction):
    chunks_of(monkeypatch, 4)
    student, teacher, labels = problem(15, torch.float64)
    ours = run(in_chunks, student, teacher, labels, reduction=reduction)
    torch.testing.assert_close(ours, run_at_once(at_once, student, teacher, labels, reduction=reduction))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@every_distillation
def test_chunked_gradients_pass_gradcheck(in_chunks, at_once, reduction):
    student, teacher, labels = problem(4, torch.float64, ignored=(1,))
    torch.autograd.gradcheck(
        lambda x, w, b: in_chunks(x, w, *teacher[:2], labels, b, teacher[2], reduction=reduction),
        student,
        fast_mode=True,
    )


@pytest.mark.parametrize("in_chunks", [linear_kl, linear_jsd])
def test_logits_are_not_rounded_to_bfloat16(implementation, in_chunks):
    student, teacher, labels = problem(64, torch.bfloat16, hidden=64, vocab=500)
    with torch.no_grad():
        student[1].mul_(2), teacher[1].mul_(2)  # logits of about 4, and of about 10 where the probability is
    ours = run(in_chunks, student, teacher, labels)
    truth = run(in_chunks, *in_float64(student, teacher), labels)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=1e-5, atol=0)
    # The gradient of the logits and the result are rounded, each by at most 2^-9 of itself. If logits were
    # rounded, by 2^-9 of 10 and not of 1, the error would be three times the limit.
    for actual, true in zip(ours[1:], truth[1:], strict=True):
        assert (actual.double() - true).norm() <= 2 * 2**-9 * true.norm()


def test_the_plain_twin_is_the_operation_on_all_logits():
    def at_temperature_one(s, t, y, **options):
        return kl_div(s, t, labels=y, **options)

    student, teacher, labels = problem(dtype=torch.float64)
    options = module.DivergenceOptions("cosine", -100)
    for kind, at_once in (("cosine", cosine_distance), ("forward_kl", at_temperature_one)):
        plain = module.linear_divergence_plain(student, teacher, labels, options._replace(kind=kind))
        expected = at_once(F.linear(*student), F.linear(*teacher), labels, reduction="none")
        torch.testing.assert_close(plain, expected)


def test_a_chunk_bounds_the_memory(monkeypatch):
    sizes = []
    true_empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *shape, **options: sizes.append(shape) or true_empty(*shape, **options),
    )
    monkeypatch.setattr(chunks, "_FEWEST_TOKENS", 1)
    student, teacher, labels = problem(600, ignored=(3,))
    run(linear_jsd, student, teacher, labels, chunk_bytes=4 * 2 * V * 4)
    assert [shape for shape in sizes if len(shape) == 2] == [(128, V), (128, V)]  # student's and teacher's


def test_only_wanted_gradients_are_computed_and_the_teacher_has_none():
    student, teacher, labels = problem()
    for t in teacher:
        t.requires_grad_()
    frozen = [student[0], student[1].detach(), student[2].detach()]
    loss = linear_jsd(*frozen[:2], *teacher[:2], labels, frozen[2], teacher[2])
    (dx,) = torch.autograd.grad(loss, frozen[0], torch.tensor(0.5))  # as `run` does
    torch.testing.assert_close(dx, run(linear_jsd, student, teacher, labels)[1])
    assert not linear_jsd(*(t.detach() for t in student[:2]), *teacher[:2], labels).requires_grad


@every_distillation
def test_without_labels_every_token_counts(implementation, in_chunks, at_once):
    student, teacher, labels = problem(6, ignored=())
    x, *rest = student
    batched = [x.detach().view(2, 3, H).requires_grad_(), *rest]
    teacher_batched = [teacher[0].view(2, 3, TEACHER_H), *teacher[1:]]
    ours = run(in_chunks, batched, teacher_batched, None, reduction="none")
    truth = run_at_once(at_once, *in_float64(student, teacher), labels, reduction="none")
    assert ours[0].shape == (2, 3)
    for a, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double().view(true.shape), true, rtol=1e-5, atol=1e-5)


def test_all_tokens_ignored_no_tokens_and_given_counts_are_handled(implementation):
    student, teacher, labels = problem()
    mean = run(linear_jsd, student, teacher, labels)
    given = run(linear_jsd, student, teacher, labels, num_items=torch.tensor(7))
    torch.testing.assert_close(given, tuple(t * 5 / 7 for t in mean))
    torch.testing.assert_close(run(linear_jsd, student, teacher, labels, num_valid=5), mean)
    labels.fill_(-100)
    assert run(linear_jsd, student, teacher, labels)[0].isnan()
    for nothing in (
        run(linear_jsd, student, teacher, labels, reduction="sum"),
        run(
            linear_jsd,
            [student[0][:0].detach().requires_grad_(), *student[1:]],
            [teacher[0][:0], *teacher[1:]],
            labels[:0],
            reduction="sum",
        ),
    ):
        assert all(t.count_nonzero() == 0 for t in nothing)


@every_distillation
def test_nothing_is_modified_and_backward_may_run_twice(implementation, in_chunks, at_once):
    student, teacher, labels = problem()
    before = [t.detach().clone() for t in (*student, *teacher, labels)]
    loss = in_chunks(*student[:2], *teacher[:2], labels, student[2], teacher[2])
    first = [g.clone() for g in torch.autograd.grad(2 * loss, student, retain_graph=True)]
    second = torch.autograd.grad(2 * loss, student)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, student)
    assert all(torch.equal(a, b) for a, b in zip(before, (*student, *teacher, labels), strict=True))


def test_autocast_chooses_the_products_dtype_and_losses_stay_in_float32():
    student, teacher, labels = problem()
    teacher = [t.to(torch.bfloat16) for t in teacher]  # a teacher in half precision with a float32 student
    truth = run(linear_jsd, student, teacher, labels)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(linear_jsd, student, teacher, labels)
    assert [t.dtype for t in ours] == [torch.float32] * 4
    for a, b in zip(ours, truth, strict=True):
        assert not torch.equal(a, b)  # bfloat16 was used
        torch.testing.assert_close(
            a, b, rtol=0, atol=2**-5 * b.abs().max().item()
        )  # a few roundings of a logit by 2^-8


def test_in_float16_the_loss_scale_saves_gradients_from_a_large_divisor():
    student, teacher, labels = problem(dtype=torch.float16)

    def grads(student, teacher):
        loss = linear_jsd(*student[:2], *teacher[:2], labels, student[2], teacher[2], num_items=2**22)
        return torch.autograd.grad(loss * 2**18, student)

    for ours, true in zip(grads(student, teacher), grads(*in_float64(student, teacher)), strict=True):
        # A logit below 20 is rounded by 2^-11 of it, and so are the gradient of the logits and the result.
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=2**-6 * true.abs().max().item())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_it_traces_without_a_graph_break(reduction):
    student, teacher, labels = problem()

    def step(x, w, b):
        return linear_jsd(x, w, *teacher[:2], labels, b, teacher[2], beta=0.3, reduction=reduction, **SCALING)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        loss_and_grads(compiled(*student), student), loss_and_grads(step(*student), student)
    )


@pytest.mark.parametrize("length", [0.0, 5e-9], ids=["zero", "below the smallest"])
def test_vector_norms_below_the_minimum_are_clamped_to_it(implementation, length):
    student, teacher, labels = problem(ignored=())
    with torch.no_grad():
        student[0][2] = 0
        student[2][:] = length * F.normalize(torch.randn(V), dim=0)
    ours = run(linear_cosine_distillation, student, teacher, labels, reduction="none")

    def by_definition(s, t, *_, **__):  # torch's own function has another gradient there
        s, t = (F.normalize(logits, dim=1, eps=1e-8) for logits in (s, t))
        return 1 - (s * t).sum(1)

    truth = run_at_once(by_definition, *in_float64(student, teacher), labels, reduction="none")
    assert length or ours[0][2] == 1
    for a, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double(), true, rtol=1e-5, atol=1e-5 * true.abs().max().item())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"teacher_x": torch.zeros(6, TEACHER_H)}, ValueError, "of the same tokens"),
        ({"teacher_weight": torch.zeros(V + 1, TEACHER_H)}, ValueError, "one vocabulary"),
        ({"student_weight": torch.zeros(V, H + 1)}, ValueError, r"expected x \[..., H\]"),
        ({"teacher_bias": torch.zeros(3)}, ValueError, "bias has shape"),
        ({"labels": torch.zeros(7)}, TypeError, "expected int64 or int32"),
        ({"labels": torch.full((7,), V)}, IndexError, f"label {V} at position 0"),
        ({"teacher_x": torch.zeros(7, TEACHER_H).half()}, TypeError, "one floating dtype"),
        ({"beta": -0.1}, ValueError, "beta is -0.1"),
        ({"teacher_softcap": -3.0}, ValueError, "teacher_softcap is -3.0"),
        ({"reduction": "batchmean"}, ValueError, "expected 'none', 'mean' or 'sum'"),
    ],
)
def test_incompatible_inputs_are_refused(change, error, message):
    student, teacher, labels = problem()
    arguments = {
        "student_x": student[0],
        "student_weight": student[1],
        "teacher_x": teacher[0],
        "teacher_weight": teacher[1],
        "labels": labels,
    }
    with pytest.raises(error, match=message):
        linear_jsd(**(arguments | change))


# On a GPU


LLAMA = {"device": "cuda", "dtype": torch.bfloat16, "hidden": 2048, "vocab": 128256}


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [module.CHUNK_BYTES, 1], ids=["one chunk", "two chunks"])
@every_distillation
def test_it_is_as_accurate_as_eager(in_chunks, at_once, chunk_bytes):
    student, teacher, labels = problem(2048, ignored=range(0, 2048, 50), **LLAMA)
    truth = run_at_once(at_once, *in_float64(student, teacher), labels)
    eager_student = [t.detach().requires_grad_() for t in student]
    logits, teacher_logits = F.linear(*eager_student).float(), F.linear(*teacher)
    eager = loss_and_grads(at_once(logits, teacher_logits, labels), eager_student)
    ours = run(in_chunks, student, teacher, labels, chunk_bytes=chunk_bytes)
    # The mean of 2,000 losses, each off by the rounding of logits (2^-8 of them).
    assert abs(ours[0] - truth[0]) <= 1e-2 * 2**-8 * max(truth[0].abs().item(), 1.0)
    for a, b, true in zip(ours[1:], eager[1:], truth[1:], strict=True):
        error, eager_error = ((g.double() - true).norm() / true.norm() for g in (a, b))
        assert error <= 1.01 * eager_error, (error, eager_error)  # over 10^6 elements chance evens out


@pytest.mark.gpu
def test_memory_stays_within_its_chunk():
    student, teacher, labels = problem(16384, ignored=(), **LLAMA)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x, weight, _ = student
    linear_jsd(x, weight, *teacher[:2], labels).backward()
    extra = torch.cuda.max_memory_allocated() - before - weight.grad.nbytes - x.grad.nbytes
    # All logits would be 8.4 GB, in bfloat16 and without a gradient.
    assert extra <= 1.2 * module.CHUNK_BYTES, extra


@pytest.mark.gpu
def test_it_runs_compiled_on_a_gpu():
    student, teacher, labels = problem(3000, torch.bfloat16, device="cuda", hidden=64, vocab=1000)
    compiled = torch.compile(linear_jsd, fullgraph=True)
    torch.testing.assert_close(
        run(compiled, student, teacher, labels), run(linear_jsd, student, teacher, labels)
    )
