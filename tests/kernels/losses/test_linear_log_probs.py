"""Scores of tokens, from logits or in chunks of tokens, against autograd through all logits in float64."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import linear_log_probs, log_probs
from liger_models.kernels.losses.linear_log_probs import linear_log_probs_plain
from liger_models.kernels.losses.log_probs import log_probs_plain

rows = importlib.import_module("liger_models.kernels.losses._score_rows")
chunks = importlib.import_module("liger_models.kernels.losses._linear_chunks")
H, V = 8, 37

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 2.5},
    "all": {"temperature": 1.7, "softcap": 3.0, "logit_scale": 1.4},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def problem(tokens=7, dtype=torch.float32, ignored=(1, 4), device="cpu", hidden=H, vocab=V):
    x = torch.randn(tokens, hidden, device=device)
    weight = torch.randn(vocab, hidden, device=device) * (2 * hidden**-0.5)
    bias = torch.randn(vocab, device=device)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels[list(ignored)] = -100
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)], labels


def in_float64(operands):
    return [t.detach().double().requires_grad_() for t in operands]


def run(function, operands, labels, **options):
    """Both results, and the gradients for upstream gradients that differ from token to token."""
    x, weight, bias = operands
    results = function(x, weight, labels, bias, entropy=True, **options)[:2]
    first = torch.linspace(0.5, 2.0, labels.numel(), device=x.device).view(labels.shape)
    upstream = [first.to(results[0].dtype), (first - 1.1).to(results[0].dtype)]
    return *results, *torch.autograd.grad(results, operands, upstream)


def test_the_plain_twin_matches_torchs_categorical_distribution():
    operands, labels = problem(dtype=torch.float64, ignored=())
    x, weight, bias = operands
    z = 3.0 * torch.tanh(1.4 * F.linear(x, weight, bias) / 3.0) / 1.7
    distribution = torch.distributions.Categorical(logits=z)
    expected = distribution.log_prob(labels), distribution.entropy()
    found = linear_log_probs_plain(x, weight, labels, bias, **OPTIONS["all"])
    torch.testing.assert_close(found[:2], expected)
    assert torch.equal(found.is_top1, z.argmax(1) == labels)
    torch.testing.assert_close(found.log_sum_sq_probs, distribution.probs.square().sum(1).log())


def small_tiles(monkeypatch):
    """Split a row into three tiles, the last one partly empty."""
    monkeypatch.setattr(rows, "_SCORE_TILE", (8, 2))
    monkeypatch.setattr(rows, "_GRADIENT_TILE", ((8, 2), (8, 2)))
    monkeypatch.setattr(rows, "_BACKWARD_BLOCK", 16)


@every_option
def test_float32_is_as_close_as_rounding_allows(monkeypatch, implementation, options):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 2)  # five tokens with a label: two, two and one
    small_tiles(monkeypatch)
    operands, labels = problem()
    ours = run(linear_log_probs, operands, labels, **options)
    truth = run(linear_log_probs_plain, in_float64(operands), labels, **options)
    for a, true in zip(ours, truth, strict=True):
        assert a.dtype == torch.float32
        # Logits are below 20, with a few roundings each, which exp turns into relative errors.
        atol = 16 * 20 * torch.finfo(torch.float32).eps * true.abs().max().item()
        torch.testing.assert_close(a.double(), true, rtol=0, atol=atol)


@every_option
def test_chunks_make_no_difference_in_float64(monkeypatch, options):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 4)
    operands, labels = problem(15, torch.float64)
    ours = run(linear_log_probs, operands, labels, **options)
    torch.testing.assert_close(ours, run(linear_log_probs_plain, operands, labels, **options))


@every_option
def test_chunked_gradients_pass_gradcheck(options):
    operands, labels = problem(4, torch.float64, ignored=(1,))
    torch.autograd.gradcheck(
        lambda x, w, b: linear_log_probs(x, w, labels, b, entropy=True, **options)[:2],
        operands,
        fast_mode=True,
    )


def test_each_token_may_have_its_temperature(monkeypatch, implementation):
    """Through logits and through chunks, capped, with their own gradients and with known ones."""
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 2)
    small_tiles(monkeypatch)
    operands, labels = problem()
    options = {"temperature": torch.linspace(0.4, 2.0, 7), "softcap": 3.0, "logit_scale": 1.4}
    coefficients = torch.linspace(-1.0, 2.0, 7)
    truth = run(linear_log_probs_plain, in_float64(operands), labels, **options)
    wide = in_float64(operands)
    sums = linear_log_probs_plain(*wide[:2], labels, wide[2], **options)[0]
    expected = torch.autograd.grad((coefficients * sums).sum(), wide)
    known = linear_log_probs(*operands[:2], labels, operands[2], coefficients=coefficients, **options)

    def of_logits(x, weight, labels, bias, **options):
        return log_probs(F.linear(x, weight, bias), labels, **options)

    for ours, true in (
        (run(linear_log_probs, operands, labels, **options), truth),
        (run(of_logits, operands, labels, **options), truth),
        (torch.autograd.grad(known.weighted_sum, operands), expected),
    ):
        for a, b in zip(ours, true, strict=True):
            # As in the test above, with logits that the smallest temperature multiplies by 2.5.
            atol = 16 * 50 * torch.finfo(torch.float32).eps * b.abs().max().item()
            torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)


def test_gradients_with_temperatures_of_tokens_pass_gradcheck():
    operands, labels = problem(4, torch.float64, ignored=(1,))
    options = {"temperature": torch.tensor([0.5, 0.7, 1.3, 2.0]), "softcap": 3.0, "entropy": True}
    torch.autograd.gradcheck(
        lambda x, w, b: linear_log_probs(x, w, labels, b, **options)[:2], operands, fast_mode=True
    )


def test_either_result_alone_gets_its_gradient(implementation):
    operands, labels = problem(4, ignored=(1,))
    for which in (0, 1):
        ours = torch.autograd.grad(
            linear_log_probs(*operands[:2], labels, operands[2], entropy=True)[which].sum(), operands
        )
        wide = in_float64(operands)
        truth = torch.autograd.grad(linear_log_probs_plain(*wide[:2], labels, wide[2])[which].sum(), wide)
        torch.testing.assert_close([t.double() for t in ours], list(truth), rtol=1e-4, atol=1e-5)


def test_impossible_tokens_and_impossible_labels_are_handled(implementation):
    operands, labels = problem(3, ignored=())
    with torch.no_grad():
        operands[2][:20] = -math.inf
    labels[:] = torch.tensor([30, 4, 25])
    log_probs, entropy, dx, _, db = run(linear_log_probs, operands, labels)
    assert log_probs.isneginf().tolist() == [False, True, False]
    possible = [operands[0], operands[1][20:], operands[2][20:]]
    kept = [t.detach().requires_grad_() for t in possible]
    same = run(linear_log_probs, kept, torch.tensor([10, 0, 5]))
    torch.testing.assert_close((log_probs[::2], entropy), (same[0][::2], same[1]))
    torch.testing.assert_close(dx[::2], same[2][::2], rtol=1e-4, atol=1e-5)
    assert db.isfinite().all()


def test_ignored_tokens_give_zeros_and_no_gradient(implementation):
    operands, labels = problem(6)
    labels, x = labels.view(2, 3).int(), operands[0].detach().view(2, 3, H).requires_grad_()
    log_probs, entropy, dx, *_ = run(linear_log_probs, [x, *operands[1:]], labels)
    ignored = labels == -100
    assert log_probs.shape == entropy.shape == labels.shape
    for t in (log_probs, entropy, dx):
        assert t[ignored].count_nonzero() == 0
        assert t[~ignored].all()
    labels.fill_(-100)
    assert all(t.count_nonzero() == 0 for t in run(linear_log_probs, [x, *operands[1:]], labels))


def test_nothing_is_modified_and_backward_may_run_twice(implementation):
    operands, labels = problem()
    before = [t.detach().clone() for t in (*operands, labels)]
    results = linear_log_probs(*operands[:2], labels, operands[2], entropy=True)
    loss = results[0].sum() - 0.3 * results[1].sum()
    first = torch.autograd.grad(loss, operands, retain_graph=True)
    second = torch.autograd.grad(loss, operands)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (*operands, labels), strict=True))


EVERYTHING = {"entropy": True, "top1": True, "log_sum_sq_probs": True}


def assert_same_scores(ours, truth):
    for name in ("log_probs", "entropy", "log_sum_sq_probs"):
        a, true = getattr(ours, name), getattr(truth, name)
        atol = 16 * 20 * torch.finfo(torch.float32).eps * true.abs().max().item()  # as above
        torch.testing.assert_close(a.double(), true, rtol=0, atol=atol)
    assert torch.equal(ours.is_top1, truth.is_top1)


@every_option
def test_all_scores_of_hidden_states_and_of_logits_are_correct(monkeypatch, implementation, options):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 4)
    small_tiles(monkeypatch)
    operands, labels = problem(15)
    x, weight, bias = operands
    with torch.no_grad():
        logits = F.linear(x, weight, bias)
        labels[5:] = logits[5:].argmax(1)
        labels[9] = -100
    truth = linear_log_probs_plain(*in_float64(operands)[:2], labels, bias.double(), **options)
    assert truth.is_top1[5:9].all()
    assert not truth.is_top1[9]
    assert_same_scores(linear_log_probs(x, weight, labels, bias, **EVERYTHING, **options), truth)
    leaf = logits.clone().requires_grad_()
    scores = log_probs(leaf, labels, **EVERYTHING, **options)
    assert_same_scores(scores, truth)
    assert not scores.is_top1.requires_grad
    assert not scores.log_sum_sq_probs.requires_grad
    wide = logits.double().requires_grad_()
    true = log_probs_plain(wide, labels, **options)
    ours = torch.autograd.grad(scores.log_probs.sum() + (scores.entropy**2).sum(), leaf)
    theirs = torch.autograd.grad(true.log_probs.sum() + (true.entropy**2).sum(), wide)
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(leaf, logits)


def test_the_first_of_equal_logits_is_the_top_one(implementation):
    logits = torch.zeros(4, V)
    logits[:, 7] = logits[:, 30] = 2.0
    labels = torch.tensor([7, 30, 3, -100])
    for scale, first in ((1.0, [True, False, False, False]), (-1.0, [False] * 4)):
        assert log_probs(logits, labels, top1=True, logit_scale=scale).is_top1.tolist() == first


def test_scores_that_are_not_requested_are_none():
    operands, labels = problem()
    assert linear_log_probs(*operands[:2], labels)[1:] == (None,) * 4


@every_option
def test_known_coefficients_give_the_same_gradients_in_three_products(monkeypatch, implementation, options):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 4)
    small_tiles(monkeypatch)
    operands, labels = problem(15)
    x, weight, bias = operands
    coefficients = torch.randn(15)
    truth = linear_log_probs_plain(*(wide := in_float64(operands))[:2], labels, wide[2], **options)
    true = (coefficients * truth.log_probs).sum()
    calls = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: calls.append(1) or mm(*a, **k))
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: calls.append(1) or addmm(*a, **k))
    wanted = EVERYTHING | options
    scores = linear_log_probs(x, weight, labels, bias, coefficients=coefficients, **wanted)
    assert_same_scores(scores, truth)
    assert not scores.log_probs.requires_grad
    # Fifteen log-probabilities of logits as large as above.
    torch.testing.assert_close(scores.weighted_sum.double(), true, rtol=0, atol=15 * 16 * 20 * 2**-23)
    made = len(calls)
    ours = torch.autograd.grad(-3 * scores.weighted_sum, operands)
    assert len(calls) == made  # all of them in the forward pass
    assert made == 8  # logits and dx of four chunks; dW is accumulated in place
    for a, b in zip(ours, torch.autograd.grad(-3 * true, wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_known_coefficients_trace_without_a_graph_break():
    operands, labels = problem()

    def step(x, w, y, b):
        scores = linear_log_probs(x, w, y, b, coefficients=torch.arange(7.0), entropy=True)
        return scores.weighted_sum + scores.entropy.sum()

    x, weight, bias = operands
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x, weight, labels, bias), operands)
    for a, b in zip(ours, torch.autograd.grad(step(x, weight, labels, bias), operands), strict=True):
        torch.testing.assert_close(a, b)


def test_only_a_chunk_of_logits_exists(monkeypatch):
    sizes = []
    true_empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *shape, **options: sizes.append(shape) or true_empty(*shape, **options),
    )
    monkeypatch.setattr(chunks, "_FEWEST_TOKENS", 1)
    operands, labels = problem(600, ignored=range(0, 600, 2))
    run(linear_log_probs, operands, labels, chunk_bytes=1)
    # 300 tokens with a label: chunks of 128, the forward and backward passes in the same memory.
    assert [shape for shape in sizes if len(shape) == 2] == [(128, V)]


def test_the_last_chunk_of_logits_is_made_once_and_one_is_kept_per_device(monkeypatch, implementation):
    """Gradients equal, bit for bit, those of recomputed logits, which an earlier forward pass gets."""
    made = []
    fill = chunks._LogitsBuffer.fill
    monkeypatch.setattr(chunks._LogitsBuffer, "fill", lambda *a: made.append(1) or fill(*a))
    for size, again in ((8, 0), (2, 3)):
        monkeypatch.setattr(chunks, "_chunk_size", lambda *_, size=size: size)
        operands, labels = problem(8, ignored=(5,))
        x, weight, bias = operands
        made.clear()
        scores = linear_log_probs(x, weight, labels, bias, entropy=True)
        forward = len(made)
        loss = scores.log_probs.sum() - 0.3 * scores.entropy.sum()
        first = torch.autograd.grad(loss, operands, retain_graph=True)
        assert len(made) == forward + again
        made.clear()
        assert all(map(torch.equal, first, torch.autograd.grad(loss, operands)))
        assert len(made) == forward  # the gradient overwrote the logits that were kept

        earlier, later = (linear_log_probs(x, weight, labels, bias, entropy=True) for _ in range(2))
        with torch.no_grad():
            linear_log_probs(2 * x, weight, labels, bias)  # no backward pass follows
        for found, expected in ((earlier, forward), (later, again)):
            made.clear()
            loss = found.log_probs.sum() - 0.3 * found.entropy.sum()
            assert all(map(torch.equal, first, torch.autograd.grad(loss, operands)))
            assert len(made) == expected


def test_it_traces_without_a_graph_break():
    operands, labels = problem()

    def step(x, w, y, b, **wanted):
        return linear_log_probs(x, w, y, b, temperature=0.7, softcap=3.0, **wanted)

    def each(x, w, y, b, t, **wanted):
        return linear_log_probs(x, w, y, b, temperature=t, **wanted)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, operands, labels), run(step, operands, labels))
    compiled, own = torch.compile(each, fullgraph=True, backend="aot_eager"), {"t": torch.linspace(0.5, 2, 7)}
    torch.testing.assert_close(run(compiled, operands, labels, **own), run(each, operands, labels, **own))


def test_results_may_be_modified_in_place(implementation):
    operands, labels = problem()
    mask = torch.linspace(0.0, 1.0, 7)
    truth = run(lambda *a, **k: [mask * t for t in linear_log_probs(*a, **k)[:2]], operands, labels)
    ours = run(lambda *a, **k: [t.mul_(mask) for t in linear_log_probs(*a, **k)[:2]], operands, labels)
    assert all(map(torch.equal, ours, truth))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature is -1.0"),
        ({"temperature": torch.ones(6)}, ValueError, r"the shape \[6\]; expected \[7\], as labels"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
        ({"labels": torch.zeros(7)}, TypeError, "expected int64 or int32"),
        ({"labels": torch.zeros(6, dtype=torch.long)}, ValueError, "labels have shape"),
        ({"labels": torch.full((7,), -1)}, IndexError, f"label -1 .* vocabulary of {V}"),
        ({"weight": torch.zeros(V, H).half()}, TypeError, "one floating dtype"),
        ({"coefficients": torch.zeros(6)}, ValueError, r"expected \[\d+\], as labels"),
    ],
)
def test_incompatible_inputs_are_refused(change, error, message):
    (x, weight, _), labels = problem()
    with pytest.raises(error, match=message):
        linear_log_probs(**({"x": x, "weight": weight, "labels": labels} | change))


# On a GPU


LLAMA = {"device": "cuda", "dtype": torch.bfloat16, "hidden": 2048, "vocab": 128256}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 30.0}], ids=["plain", "capped"])
@pytest.mark.parametrize("size", [2048, 1024], ids=["one chunk", "two chunks"])
def test_it_is_as_accurate_as_eager(monkeypatch, options, size):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: size)
    operands, labels = problem(2048, ignored=range(0, 2048, 50), **LLAMA)
    truth = run(linear_log_probs_plain, in_float64(operands), labels, **options)
    eager = run(linear_log_probs_plain, operands, labels, **options)
    ours = run(linear_log_probs, operands, labels, **options)
    for a, b, true in zip(ours, eager, truth, strict=True):
        error, eager_error = ((g.double() - true).norm() / true.norm() for g in (a, b))
        # By chance, 2,000 log-probabilities differ by a few times 1 / sqrt(2000); gradients by less.
        assert error <= max(1.01, 1 + 4 / true.numel() ** 0.5) * eager_error, (error, eager_error)


@pytest.mark.gpu
def test_memory_stays_within_its_chunk():
    (x, weight, _), labels = problem(32768, ignored=(), **LLAMA)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    log_probs, entropy, *_ = linear_log_probs(x, weight, labels, entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    extra = torch.cuda.max_memory_allocated() - before - weight.grad.nbytes - x.grad.nbytes
    # All logits would be 8.4 GB, in bfloat16 and without a gradient.
    assert extra <= 1.2 * chunks.CHUNK_BYTES, extra


@pytest.mark.gpu
def test_all_scores_and_known_coefficients_are_correct_on_a_gpu():
    operands, labels = problem(2048, ignored=range(0, 2048, 50), **LLAMA)
    x, weight, bias = operands
    labels[1::2] = torch.nn.functional.linear(x, weight, bias)[1::2].argmax(1)
    coefficients = torch.randn(2048, device="cuda")
    truth = linear_log_probs_plain(*in_float64(operands)[:2], labels, bias.double())
    for known in ({}, {"coefficients": coefficients}):
        scores = linear_log_probs(x, weight, labels, bias, **EVERYTHING, **known)
        # The logits, of up to 20, are rounded to bfloat16.
        for name in ("log_probs", "entropy", "log_sum_sq_probs"):
            torch.testing.assert_close(
                getattr(scores, name), getattr(truth, name).float(), rtol=0, atol=20 * 2**-8
            )
        assert scores.is_top1[1::2].float().mean() > 0.95  # except for ties of rounded logits
    unknown = linear_log_probs(x, weight, labels, bias)
    grads = torch.autograd.grad((coefficients * unknown.log_probs).sum(), operands)
    known = torch.autograd.grad(scores.weighted_sum, operands)
    for a, b in zip(known, grads, strict=True):
        assert (a - b).float().norm() <= 2**-7 * b.float().norm()  # both round a gradient to bfloat16


@pytest.mark.gpu
def test_it_runs_compiled_on_a_gpu():
    operands, labels = problem(3000, torch.bfloat16, device="cuda", hidden=64, vocab=1000)
    compiled = torch.compile(linear_log_probs, fullgraph=True)
    torch.testing.assert_close(run(compiled, operands, labels), run(linear_log_probs, operands, labels))
