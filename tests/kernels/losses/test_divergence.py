"""Divergences: the plain twin against PyTorch's kl_div, the kernels against the plain twin in float64."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import generalized_jsd, kl_div, total_variation

module = importlib.import_module("liger_models.kernels.losses.divergence")
kernels = importlib.import_module("liger_models.kernels.losses._divergence_kernels")
EPS = torch.finfo(torch.float32).eps
V = 37


def jsd(beta, temperature=1.0):
    return lambda s, t, **options: generalized_jsd(s, t, beta=beta, temperature=temperature, **options)


DIVERGENCES = {
    "forward KL": lambda s, t, **options: kl_div(s, t, temperature=2.5, **options),
    "reverse KL": jsd(1.0, 0.7),
    "JSD near the student": jsd(0.2, 1.7),
    "JSD near the teacher": jsd(0.9),
    "total variation": lambda s, t, **options: total_variation(s, t, temperature=1.3, **options),
}
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
CAPPED = {
    "capped student, forward KL": lambda s, t, **options: kl_div(
        s, t, temperature=1.3, softcap=2.5, logit_scale=-0.6, **options
    ),
    "capped student and teacher, JSD": lambda s, t, **options: generalized_jsd(
        s, t, beta=0.4, softcap=3.0, teacher_softcap=2.0, teacher_logit_scale=1.7, **options
    ),
}
capped_or_not = pytest.mark.parametrize(
    "divergence", (DIVERGENCES | CAPPED).values(), ids=DIVERGENCES | CAPPED
)


def batch(tokens=4, vocab=V, dtype=torch.float32, device="cpu"):
    student = (3 * torch.randn(tokens, vocab, device=device)).to(dtype).requires_grad_()
    teacher = (3 * torch.randn(tokens, vocab, device=device)).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels[1] = -100
    return student, teacher, labels


def loss_and_grad(function, student, teacher, **options):
    """The loss and its gradient for a fixed upstream gradient that is not one."""
    loss = function(student, teacher, **options)
    upstream = torch.linspace(0.5, 2.0, loss.numel(), device=loss.device).to(loss).reshape(loss.shape)
    return loss, torch.autograd.grad(loss, student, upstream)[0]


def in_float64(student, teacher):
    return student.detach().double().requires_grad_(), teacher.double()


@pytest.fixture
def small_tiles(monkeypatch):
    """Split a row of 37 columns into three tiles and three blocks, the last of each partly empty."""
    for tile in ("_FORWARD_TILE", "_KL_TILE"):
        monkeypatch.setattr(kernels, tile, (8, 2))
    monkeypatch.setattr(kernels, "_BACKWARD_BLOCK", 16)


def log_probs(logits, temperature=1.0):
    return F.log_softmax(logits / temperature, -1)


def test_forward_kl_matches_torchs_kl_div_of_student_and_teacher():
    student, teacher, _ = batch(dtype=torch.float64)
    ours = loss_and_grad(kl_div, student, teacher, temperature=2.0)
    theirs = loss_and_grad(
        lambda s, t: F.kl_div(log_probs(s, 2.0), log_probs(t, 2.0), reduction="batchmean", log_target=True),
        student,
        teacher,
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours[0], generalized_jsd(student, teacher, beta=0.0, temperature=2.0))


def test_reverse_kl_exchanges_student_and_teacher():
    student, teacher, _ = batch(dtype=torch.float64)
    ours = loss_and_grad(jsd(1.0), student, teacher)
    theirs = loss_and_grad(
        lambda s, t: F.kl_div(log_probs(t), log_probs(s), reduction="batchmean", log_target=True),
        student,
        teacher,
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.75])
def test_jsd_is_two_kl_divergences_from_a_mixture_with_beta_of_the_teacher(beta):
    student, teacher, _ = batch(dtype=torch.float64)

    def by_definition(s, t):
        p, q = log_probs(t, 1.5).exp(), log_probs(s, 1.5).exp()
        m = beta * p + (1 - beta) * q
        return (beta * (p * (p / m).log()).sum(1) + (1 - beta) * (q * (q / m).log()).sum(1)).mean()

    ours = loss_and_grad(jsd(beta, 1.5), student, teacher)
    torch.testing.assert_close(ours, loss_and_grad(by_definition, student, teacher))


def test_total_variation_is_the_largest_difference_of_an_events_probabilities():
    student, teacher, _ = batch(dtype=torch.float64)
    p, q = log_probs(teacher).exp(), log_probs(student).exp()
    largest = (p - q).clamp(min=0).sum(1)  # the event of all tokens that the teacher gives more probability
    torch.testing.assert_close(total_variation(student, teacher, reduction="none"), largest)


def test_logits_are_scaled_then_capped_then_divided_by_the_temperature():
    student, teacher, _ = batch(dtype=torch.float64)
    plain = {"beta": 0.3, "temperature": 1.0}
    scaled = plain | {"temperature": 1.7, "logit_scale": 0.6, "softcap": 2.5}
    scaled |= {"teacher_logit_scale": -1.4, "teacher_softcap": 4.0}
    ours = loss_and_grad(generalized_jsd, student, teacher, **scaled)
    theirs = loss_and_grad(
        lambda s, t: generalized_jsd(
            2.5 * torch.tanh(0.6 * s / 2.5) / 1.7, 4.0 * torch.tanh(-1.4 * t / 4.0) / 1.7, **plain
        ),
        student,
        teacher,
    )
    torch.testing.assert_close(ours, theirs)
    just_scaled = loss_and_grad(kl_div, student, teacher, logit_scale=0.6, teacher_logit_scale=2.0)
    theirs = loss_and_grad(lambda s, t: kl_div(0.6 * s, 2.0 * t), student, teacher)
    torch.testing.assert_close(just_scaled, theirs)


@capped_or_not
def test_the_plain_twin_passes_gradcheck(divergence):
    student, teacher, labels = batch(tokens=4, vocab=6, dtype=torch.float64)
    for reduction in ("none", "mean"):
        torch.autograd.gradcheck(
            lambda s, r=reduction: divergence(s, teacher, labels=labels, reduction=r), student, fast_mode=True
        )


@capped_or_not
def test_float32_is_as_close_as_rounding_allows(divergence, implementation, small_tiles):
    student, teacher, labels = batch()
    options = {"labels": labels, "reduction": "none"}
    loss, grad = loss_and_grad(divergence, student, teacher, **options)
    true_loss, true_grad = loss_and_grad(divergence, *in_float64(student, teacher), **options)
    assert loss.dtype == torch.float32
    # Logits divided by the temperature are below 20, and each is rounded a few times before exp turns its
    # error into a relative one; a term of the loss or of the gradient has a difference of two of them.
    atol = 2 * 16 * 20 * EPS
    torch.testing.assert_close(loss.double(), true_loss, rtol=16 * EPS, atol=atol)
    torch.testing.assert_close(grad.double(), true_grad, rtol=0, atol=atol * true_grad.abs().max().item())


@capped_or_not
def test_the_gradient_written_over_the_students_logits_is_the_same(divergence, implementation, small_tiles):
    for dtype in (torch.float32, torch.float64):
        student, teacher, labels = batch(3, dtype=dtype)
        seen = []

        def record(*arguments, seen=seen):
            seen.append(arguments[3])
            return torch.zeros(len(arguments[0]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "divergence_plain", record)
            patch.setattr(module, "use_triton", lambda *_: False)
            divergence(student, teacher)
        (options,) = seen
        scale = torch.rand(len(labels), dtype=dtype)
        upstream_loss = divergence(student, teacher, labels=labels, reduction="none")
        (expected,) = torch.autograd.grad(upstream_loss, student, scale)
        logits = student.detach().clone()
        losses = module.row_divergences(logits, teacher, labels, options, scale)
        torch.testing.assert_close(losses, upstream_loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@every_divergence
def test_equal_distributions_have_zero_divergence(divergence, implementation):
    student, _, _ = batch()
    shifted = student.detach() + torch.randn(len(student), 1)
    loss, grad = loss_and_grad(divergence, student, shifted)
    assert loss.abs() <= 16 * 20 * EPS  # rounding of logits below 20, times probabilities
    if divergence is not DIVERGENCES["total variation"]:  # its slope jumps there
        assert grad.abs().max() <= 16 * 20 * EPS


@every_divergence
def test_impossible_tokens_add_nothing(divergence, implementation, small_tiles):
    student, teacher, _ = batch(2)
    few = loss_and_grad(divergence, student[:, :20].detach().requires_grad_(), teacher[:, :20])
    with torch.no_grad():
        student[:, 20:] = -math.inf
        teacher[:, 20:] = -math.inf
    loss, grad = loss_and_grad(divergence, student, teacher)
    torch.testing.assert_close((loss, grad[:, :20]), few, rtol=1e-5, atol=1e-6)
    assert grad[:, 20:].count_nonzero() == 0


def test_a_token_that_only_one_of_them_rules_out_is_finite_but_for_a_kl_divergence(implementation):
    student, teacher, _ = batch(3)
    with torch.no_grad():
        student[0, :9] = -math.inf
        teacher[1, 9:] = -math.inf
    for divergence in (jsd(0.3), total_variation):
        ours = loss_and_grad(divergence, student, teacher, reduction="none")
        with torch.no_grad():
            finite = student.clamp(min=-200), teacher.clamp(min=-200)  # e^-200 is negligible
        truth = loss_and_grad(divergence, *in_float64(*finite), reduction="none")
        torch.testing.assert_close([t.double() for t in ours], list(truth), rtol=1e-5, atol=1e-6)
    assert kl_div(student, teacher, reduction="none").isinf().tolist() == [True, False, False]
    reverse = generalized_jsd(student, teacher, beta=1.0, reduction="none")
    assert reverse.isinf().tolist() == [False, True, False]


@every_divergence
def test_logits_far_apart_neither_overflow_nor_vanish(divergence, implementation):
    student, teacher, _ = batch(3)
    with torch.no_grad():
        student[0, 3], teacher[0, 5] = 3e4, 2e4
        student[1] -= 1e4
    ours = loss_and_grad(divergence, student, teacher, reduction="none")
    truth = loss_and_grad(divergence, *in_float64(student, teacher), reduction="none")
    # A float32 logit of 1e4 has an ulp of 1e-3, and so has the log-sum-exp of its row.
    torch.testing.assert_close([t.double() for t in ours], list(truth), rtol=2e-3, atol=2e-3)


@capped_or_not
def test_rows_without_a_label_have_no_loss_and_no_gradient(divergence, implementation):
    student, teacher, labels = batch()
    with torch.no_grad():
        student[1], teacher[1] = math.nan, math.inf
    ignored = labels == -100
    losses, grad = loss_and_grad(divergence, student, teacher, labels=labels, reduction="none")
    assert losses[ignored].count_nonzero() == 0
    assert grad[ignored].count_nonzero() == 0
    kept = student.detach()[~ignored].requires_grad_()
    mean, grad = loss_and_grad(divergence, student, teacher, labels=labels)
    torch.testing.assert_close((mean, grad[~ignored]), loss_and_grad(divergence, kept, teacher[~ignored]))


def test_the_mean_over_nothing_is_nan_and_the_sum_zero(implementation):
    student, teacher, labels = batch()
    labels.fill_(7)
    options = {"labels": labels, "ignore_index": 7}
    assert kl_div(student, teacher, **options).isnan()
    for more in ({"reduction": "sum"}, {"num_items": 3}):
        loss, grad = loss_and_grad(kl_div, student, teacher, **options, **more)
        assert loss == 0
        assert grad.count_nonzero() == 0
    for shape in ((0, 5), (2, 0, 5)):
        empty = torch.zeros(shape, requires_grad=True)
        loss, grad = loss_and_grad(kl_div, empty, empty.detach(), reduction="sum")
        assert loss == 0
        assert grad.shape == shape


def test_num_items_divides_the_sum():
    student, teacher, labels = batch()
    for more in ({}, {"labels": labels}):
        total = generalized_jsd(student, teacher, reduction="sum", **more)
        for count in (13, torch.tensor(13), torch.tensor([13.0])):
            mean = generalized_jsd(student, teacher, num_items=count, **more)
            torch.testing.assert_close(mean, total / 13)


@every_divergence
def test_dimensions_strides_and_mixed_dtypes_change_nothing(divergence, implementation):
    wide = torch.randn(2, 3, 20)
    student, teacher = (
        wide[..., 4:13].requires_grad_(),
        torch.randn(9, 3, 2).to(torch.bfloat16).permute(2, 1, 0),
    )
    before = wide.clone(), teacher.clone()
    labels = torch.tensor([[3, 0], [-100, 0], [1, 0]]).T[:1].expand(2, 3)
    ours = loss_and_grad(divergence, student, teacher, labels=labels, reduction="none")
    solid = student.detach().reshape(6, 9).double().requires_grad_()
    loss, grad = loss_and_grad(
        divergence, solid, teacher.reshape(6, 9).double(), labels=labels.reshape(6), reduction="none"
    )
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(
        (ours[0].double(), ours[1].double()),
        (loss.view(2, 3), grad.view(2, 3, 9)),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(wide, before[0])
    assert torch.equal(teacher, before[1])


def test_log_probabilities_are_logits_too(implementation):
    student, teacher, _ = batch()
    from_logits = loss_and_grad(kl_div, student, teacher)
    from_log_probs = loss_and_grad(lambda s, t: kl_div(log_probs(s), log_probs(t)), student, teacher)
    torch.testing.assert_close(from_logits, from_log_probs, rtol=1e-5, atol=1e-5)


def test_the_teacher_is_a_constant_and_backward_may_run_twice(implementation):
    student, teacher, _ = batch()
    teacher.requires_grad_()
    loss = generalized_jsd(student, teacher)
    first = torch.autograd.grad(loss, student, retain_graph=True)[0].clone()
    assert torch.autograd.grad(loss, teacher, retain_graph=True, allow_unused=True) == (None,)
    assert torch.equal(first, torch.autograd.grad(loss, student)[0])


def test_it_traces_without_a_graph_break():
    divergence = jsd(0.3)
    student, teacher, labels = batch()
    compiled = torch.compile(divergence, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        loss_and_grad(compiled, student, teacher, labels=labels),
        loss_and_grad(divergence, student, teacher, labels=labels),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.5}, "beta is 1.5; expected a number from 0"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a positive"),
        ({"softcap": -1.0}, "softcap is -1.0; expected a positive"),
        ({"teacher_softcap": 0.0}, "teacher_softcap is 0.0; expected a positive"),
        ({"reduction": "batchmean"}, "expected 'none', 'mean' or 'sum'"),
        ({"reduction": "sum", "num_items": 3}, "drop it for reduction='sum'"),
        ({"num_items": torch.ones(2)}, "expected one number"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"labels have shape \[3\]; expected .* \[4\]"),
        ({"teacher_logits": torch.zeros(4, 5)}, "one vocabulary"),
        ({"labels": torch.zeros(4, dtype=torch.bool)}, "labels are torch.bool; expected int64 or int32"),
    ],
)
def test_incompatible_inputs_are_refused(change, message):
    student, teacher, _ = batch()
    arguments = {"student_logits": student, "teacher_logits": teacher} | change
    with pytest.raises((ValueError, TypeError), match=message):
        generalized_jsd(**arguments)


def keep_apart(student, teacher):
    """Lower the teacher's logits of tokens that both find equally likely.

    There the slope of the total variation jumps, by twice the token's part of the gradient, and the rounding
    of a log-probability decides the side.
    """
    with torch.no_grad():
        for _ in range(2):  # the first change moves all probabilities a little
            q, p = (log_probs(logits.double(), 1.3) for logits in (student, teacher))
            teacher[(q - p).abs() < 1e-3] -= 0.5
        q, p = (log_probs(logits.double(), 1.3) for logits in (student, teacher))
        assert (q - p).abs().min() > 100 * 20 * EPS


def test_total_variation_in_float32_is_as_close_as_eager_where_its_slope_does_not_jump(implementation):
    student, teacher, _ = batch(8, 3000)
    keep_apart(student, teacher)
    divergence = DIVERGENCES["total variation"]
    loss, grad = loss_and_grad(divergence, student, teacher, reduction="none")
    true_loss, true_grad = loss_and_grad(divergence, *in_float64(student, teacher), reduction="none")
    # Four roundings of a log-probability of about 20. A single wrong sign would be a hundred times that.
    for a, true in ((loss, true_loss), (grad, true_grad)):
        assert (a.double() - true).norm() <= 4 * 20 * EPS * true.norm()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@capped_or_not
def test_it_is_as_accurate_as_eager(divergence, dtype):
    for tokens, vocab in ((64, 128256), (300, 32003)):
        student, teacher, labels = batch(tokens, vocab, dtype, "cuda")
        if divergence is DIVERGENCES["total variation"]:
            keep_apart(student, teacher)
        options = {"labels": labels, "reduction": "none"}
        ours = loss_and_grad(divergence, student, teacher, **options)
        truth = loss_and_grad(divergence, *in_float64(student, teacher), **options)
        eager_student = student.detach().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                module, "use_triton", lambda *_: False
            )  # the twin computes in float32, as eager does
            eager = loss_and_grad(divergence, eager_student, teacher, **options)
        for a, b, true in zip(ours, eager, truth, strict=True):
            error, eager_error = ((t.double() - true).norm() / true.norm() for t in (a, b))
            # Eager's own error, or four roundings of a log-probability of about 20 in float32.
            assert error <= max(1.01 * eager_error, 4 * 20 * EPS), (error, eager_error)


@pytest.mark.gpu
def test_it_runs_compiled_on_a_gpu_and_in_a_cuda_graph():
    student, teacher, labels = batch(50, 3000, torch.bfloat16, "cuda")

    def step(function=generalized_jsd):
        return loss_and_grad(function, student, teacher, labels=labels, beta=0.3)

    torch.testing.assert_close(step(torch.compile(generalized_jsd, fullgraph=True)), step())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        student.normal_()
    graph.replay()
    torch.testing.assert_close(captured, step())
