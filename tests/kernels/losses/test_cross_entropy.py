"""cross_entropy: the plain twin against PyTorch, the kernels against the plain twin in float64."""

import importlib
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import CrossEntropyOutput, cross_entropy

kernels = importlib.import_module("liger_models.kernels.losses._cross_entropy_kernels")
EPS = torch.finfo(torch.float32).eps

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "weight": {"weight": 37},
    "weight and smoothing": {"weight": 37, "label_smoothing": 0.3},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 2.5},
    "scale": {"logit_scale": 0.6},
    "temperature": {"temperature": 1.7},
    "all": {
        "weight": 37,
        "token_weights": 11,
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 3.0,
        "logit_scale": 1.4,
        "temperature": 0.8,
    },
}


def tensors_of(options):
    """Options with fresh random vectors, in float32 and so exact in both precisions."""
    return {k: torch.rand(v) + 0.1 if k in ("weight", "token_weights") else v for k, v in options.items()}


def batch(tokens=11, vocab=37, dtype=torch.float32):
    logits = (3 * torch.randn(tokens, vocab)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    labels[[1, tokens // 2]] = -100
    return logits, labels


def loss_and_grad(function, logits, labels, **options):
    """The loss and its gradient for a fixed upstream gradient that is not one."""
    loss = function(logits, labels, **options)
    upstream = torch.linspace(0.5, 2.0, loss.numel()).to(loss).reshape(loss.shape)
    return loss, torch.autograd.grad(loss, logits, upstream)[0]


def small_tiles(monkeypatch):
    """Split a row of 37 columns into at least three tiles and three blocks, the last of each partly empty."""
    monkeypatch.setattr(kernels, "_LOSS_TILE", (8, 2))
    monkeypatch.setattr(kernels, "_BACKWARD_BLOCK", 16)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (4, 3), (2, 3, 2)])
def test_plain_twin_matches_torchs_cross_entropy(reduction, smoothing, weighted, shape):
    logits = torch.randn(shape[0], 9, *shape[1:], dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, shape)
    labels[0] = 4
    options = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "weight": torch.rand(9, dtype=torch.float64) + 0.1 if weighted else None,
        "ignore_index": 4,
    }
    ours = loss_and_grad(cross_entropy, logits, labels, **options)
    torch.testing.assert_close(ours, loss_and_grad(F.cross_entropy, logits, labels, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plain_twin_passes_gradcheck(options):
    logits, labels = batch(dtype=torch.float64)
    options = tensors_of(options)
    for reduction in ("none", "mean"):

        def losses(x, reduction=reduction):
            return cross_entropy(x, labels, reduction=reduction, return_z_loss=True, **options)[:2]

        torch.autograd.gradcheck(losses, logits, fast_mode=True)


def test_cap_temperature_and_z_loss_follow_their_formulas():
    logits, labels = batch(dtype=torch.float64)
    z = 2.0 * torch.tanh(1.5 * logits / 2.0) / 0.7
    lse = z.logsumexp(1)
    class_weight, token_weights = torch.rand(37, dtype=torch.float64), torch.rand(11, dtype=torch.float64)
    valid, column = labels != -100, labels.clamp(min=0)
    weight = (class_weight[column] * token_weights).where(valid, 0.0)
    expected = (weight * (lse - z[range(11), column] + 0.1 * lse**2)).sum() / weight.sum()
    options = {"softcap": 2.0, "logit_scale": 1.5, "temperature": 0.7, "z_loss": 0.1}
    options |= {"weight": class_weight, "token_weights": token_weights}
    output = cross_entropy(logits, labels, return_z_loss=True, **options)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.z_loss, (0.1 * weight * lse**2).sum() / weight.sum())


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float32_is_as_close_as_rounding_allows(implementation, monkeypatch, options, reduction):
    small_tiles(monkeypatch)
    logits, labels = batch()
    options = tensors_of(options) | {"reduction": reduction}
    loss, grad = loss_and_grad(cross_entropy, logits, labels, **options)
    true_loss, true_grad = loss_and_grad(cross_entropy, logits.double(), labels, **options)
    assert loss.dtype == torch.float32
    # The logits are below 20, and each is rounded a few times before exp turns its error into a relative one;
    # sums over 37 classes add little.
    torch.testing.assert_close(loss.double(), true_loss, rtol=16 * EPS, atol=16 * 20 * EPS)
    atol = 16 * 20 * EPS * true_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), true_grad, rtol=0, atol=atol)


@pytest.mark.parametrize("with_loss", [True, False])
def test_returned_z_loss_has_its_own_gradient(implementation, with_loss):
    logits, labels = batch()

    def gradient(function, x):
        loss, share, _, _ = function(x, labels, z_loss=0.1, label_smoothing=0.1, return_z_loss=True)
        return torch.autograd.grad(0.3 * loss - 1.7 * share if with_loss else -1.7 * share, x)[0]

    truth = gradient(cross_entropy, logits.detach().double().requires_grad_())
    torch.testing.assert_close(gradient(cross_entropy, logits).double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.7, -1.3, 0.0])
def test_predicted_tokens_have_the_largest_scaled_logit(implementation, monkeypatch, scale):
    small_tiles(monkeypatch)
    logits, labels = batch()
    # With a cap this low tanh saturates at one, which must not hide the order of the logits.
    output = cross_entropy(
        100 * logits, labels, logit_scale=scale, softcap=0.5, temperature=2.0, return_predicted_tokens=True
    )
    expected = (scale * logits).argmax(1).where(labels != -100, -1)
    assert torch.equal(output.predicted_tokens, expected)
    assert output.predicted_tokens.dtype == torch.int64


def test_the_first_of_equal_logits_is_predicted(implementation, monkeypatch):
    small_tiles(monkeypatch)
    logits = torch.full((4, 37), -2.0)
    logits[1, [5, 13, 30]] = -1.0  # in a lane's first and second tile, and in another lane
    logits[2, [20, 21]] = torch.tensor([-0.0, 0.0])
    logits[3] = -math.inf
    output = cross_entropy(logits, torch.zeros(4, dtype=torch.long), return_predicted_tokens=True)
    assert output.predicted_tokens.tolist() == [0, 5, 20, 0]


def test_infinite_and_nan_logits_are_ordered_as_by_torch(implementation, monkeypatch):
    small_tiles(monkeypatch)
    logits = torch.randn(6, 37)
    logits[0, 20:] = -math.inf
    logits[1, :36] = -math.inf
    logits[2, [7, 9]] = math.inf
    logits[3, [12, 30]] = math.nan
    logits[4, [3, 33]] = torch.tensor([math.inf, -math.nan])
    logits[5] = math.nan
    for scale in (1.0, -1.0):
        output = cross_entropy(
            logits, torch.ones(6, dtype=torch.long), logit_scale=scale, return_predicted_tokens=True
        )
        assert torch.equal(output.predicted_tokens, (scale * logits).argmax(1))


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
@pytest.mark.parametrize("shape", [(11,), (4, 5)])
def test_token_accuracy_counts_the_valid_tokens_predicted_correctly(implementation, ignore_index, shape):
    logits = torch.randn(shape[0], 9, *shape[1:], dtype=torch.bfloat16)
    predicted = logits.float().argmax(1)
    labels = torch.randint(0, 9, shape)
    labels.flatten()[::2] = predicted.flatten()[::2]
    labels[0] = ignore_index
    valid = labels != ignore_index
    right = ((predicted == labels) & valid).float()
    assert 0 < right.sum() < valid.sum()
    results = {"none": right, "sum": right.sum(), "mean": right.sum() / valid.sum()}
    for reduction, expected in results.items():
        output = cross_entropy(
            logits,
            labels,
            ignore_index=ignore_index,
            reduction=reduction,
            token_weights=torch.rand(shape),  # affect the loss only
            weight=torch.rand(9),
            return_token_accuracy=True,
        )
        assert torch.equal(output.token_accuracy, expected)
    nothing = torch.full(shape, ignore_index)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        output = cross_entropy(
            logits, nothing, ignore_index=ignore_index, reduction=reduction, return_token_accuracy=True
        )
        torch.testing.assert_close(output.token_accuracy, torch.tensor(expected), equal_nan=True)


def test_requested_extras_do_not_change_loss_and_gradient(implementation):
    logits, labels = batch()
    loss, grad = loss_and_grad(cross_entropy, logits, labels, label_smoothing=0.1)
    asked = [f"return_{name}" for name in CrossEntropyOutput._fields[1:]]
    for names in ([], asked[:1], asked[1:2], asked[2:], asked):
        options = dict.fromkeys(names, True)
        output = cross_entropy(logits, labels, label_smoothing=0.1, **options)
        if names:
            assert [extra is not None for extra in output[1:]] == [name in names for name in asked]
        same = output.loss if names else output
        upstream = torch.linspace(0.5, 2.0, 1)[0]
        assert torch.equal(same, loss)
        assert torch.equal(torch.autograd.grad(same, logits, upstream)[0], grad)
    assert not output.token_accuracy.requires_grad
    assert not output.predicted_tokens.requires_grad


def test_num_items_divides_the_sum(implementation):
    logits, labels = batch()
    total = cross_entropy(logits, labels, reduction="sum")
    for count in (13, torch.tensor(13), torch.tensor([13.0])):
        torch.testing.assert_close(cross_entropy(logits, labels, num_items=count), total / 13)


@pytest.mark.parametrize("dims", [1, 2])
def test_extra_dimensions_and_strides_change_nothing(implementation, dims):
    labels = torch.randint(0, 7, (3, 4, 2)[: dims + 1])
    logits = torch.randn(*labels.shape, 7).movedim(-1, 1).requires_grad_()
    rows = logits.movedim(1, -1).reshape(-1, 7)
    for reduction in ("mean", "none"):
        ours = loss_and_grad(cross_entropy, logits, labels, reduction=reduction)
        loss = F.cross_entropy(rows, labels.flatten(), reduction=reduction).reshape(ours[0].shape)
        theirs = torch.autograd.grad(
            loss, logits, torch.linspace(0.5, 2.0, loss.numel()).reshape(loss.shape), retain_graph=True
        )
        torch.testing.assert_close(ours, (loss, *theirs), rtol=1e-5, atol=1e-6)


def test_logits_are_left_alone_and_rows_may_be_strided(implementation):
    whole = torch.randn(6, 20)
    before, logits = whole.clone(), whole[:, 3:16].requires_grad_()
    labels = torch.tensor([[3, 0], [1, 0], [12, 0], [-100, 0], [2, 0], [7, 0]], dtype=torch.int32)[:, 0]
    loss, grad = loss_and_grad(cross_entropy, logits, labels)
    torch.testing.assert_close((loss, grad), loss_and_grad(F.cross_entropy, logits, labels.long()))
    assert torch.equal(whole, before)


def test_infinite_logits_have_probability_zero(implementation, monkeypatch):
    small_tiles(monkeypatch)
    logits = torch.randn(3, 37)
    logits[0, :20] = -math.inf  # the whole first block
    logits[1, 5:] = -math.inf
    logits[2, 4] = 1e30  # far beyond exp's range
    logits.requires_grad_()
    labels = torch.tensor([30, 2, 4])
    ours = loss_and_grad(cross_entropy, logits, labels, reduction="none")
    theirs = loss_and_grad(F.cross_entropy, logits, labels, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_without_a_valid_label_the_mean_is_nan_and_the_gradient_zero(implementation):
    logits, labels = batch()
    labels.fill_(-100)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        loss = cross_entropy(logits, labels, reduction=reduction)
        torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
    assert torch.autograd.grad(loss, logits)[0].count_nonzero() == 0
    assert torch.autograd.grad(cross_entropy(logits, labels, num_items=5), logits)[0].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 3), (2, 5, 0)])
def test_zero_rows_are_accepted(implementation, shape):
    logits = torch.zeros(shape, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(shape[:1] + shape[2:], dtype=torch.long), reduction="sum")
    assert loss == 0
    assert torch.autograd.grad(loss, logits)[0].shape == shape


def test_a_reduced_loss_is_one_node_of_the_graph(interpreted):
    logits, labels = batch()  # a small batch, where every launch and every node costs time
    for reduction in ("mean", "sum", "none"):
        loss = cross_entropy(logits, labels, reduction=reduction, token_weights=torch.rand(11))
        assert [type(node) for node, _ in loss.grad_fn.next_functions if node] == [
            type(torch.autograd.graph.get_gradient_edge(logits).node)
        ]


def test_token_weights_changed_before_the_backward_pass_are_an_error(implementation):
    logits, labels = batch()
    token_weights = torch.rand(11)
    loss = cross_entropy(logits, labels, token_weights=token_weights)
    token_weights.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice_gives_the_same_gradient(implementation):
    logits, labels = batch()
    loss = cross_entropy(logits, labels)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0].clone()
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])


@pytest.mark.parametrize("bad", [-1, 37, -(2**40)])
def test_label_outside_the_vocabulary_is_an_error_that_names_it(implementation, bad):
    logits, labels = batch()
    labels[6] = bad
    with pytest.raises(IndexError, match=f"label {bad} at position 6 .* vocabulary of 37"):
        cross_entropy(logits, labels)
    with pytest.raises(IndexError, match=r"position \[1, 2\]"):
        cross_entropy(logits[:8].unflatten(0, (2, 4)).movedim(-1, 1), labels[:8].view(2, 4))
    labels[6] = -100
    cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "average"}, ValueError, "'none', 'mean' or 'sum'"),
        ({"reduction": "sum", "num_items": 3}, ValueError, "num_items"),
        ({"num_items": torch.ones(2)}, ValueError, "one number"),
        ({"label_smoothing": 1.5}, ValueError, "from 0 to 1"),
        ({"softcap": 0.0}, ValueError, "positive"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"weight": torch.ones(36)}, ValueError, r"expected \[37\]"),
        ({"token_weights": torch.ones(10)}, ValueError, r"expected \[11\]"),
        ({"labels": torch.zeros(11)}, TypeError, "int64 or int32"),
        (
            {"labels": torch.zeros(10, dtype=torch.long)},
            ValueError,
            r"found logits \[11, 37\] and labels \[10\]",
        ),
    ],
)
def test_meaningless_options_are_refused(change, error, message):
    logits, labels = batch()
    with pytest.raises(error, match=message):
        cross_entropy(**({"logits": logits, "labels": labels} | change))


def test_it_compiles_without_a_graph_break():
    logits, labels = batch()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
    torch.testing.assert_close(
        loss_and_grad(compiled, logits, labels, **options),
        loss_and_grad(cross_entropy, logits, labels, **options),
    )
    asked = {f"return_{name}": True for name in CrossEntropyOutput._fields[1:]}
    torch.testing.assert_close(
        compiled(logits, labels, **options, **asked), cross_entropy(logits, labels, **options, **asked)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 50257, 262144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_as_accurate_as_eager(dtype, vocab):
    logits = (3 * torch.randn(1024, vocab, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (1024,), device="cuda")
    labels[::5] = -100
    options = {"reduction": "none", "label_smoothing": 0.1}
    truth = loss_and_grad(F.cross_entropy, logits.double(), labels, **options)
    ours = loss_and_grad(cross_entropy, logits, labels, **options)
    eager = loss_and_grad(lambda x, y, **o: F.cross_entropy(x.float(), y, **o), logits, labels, **options)
    for a, b, true in zip(ours, eager, truth, strict=True):
        error, eager_error = ((value.double() - true).norm() / true.norm() for value in (a, b))
        # In half precision, both errors are a single rounding of the gradient and differ only by chance. In
        # float32, they are a few of the last bits, which depend on the order of the sums.
        assert error <= max(1.01 * eager_error, 4 * EPS), (error, eager_error)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_predicted_tokens_on_a_gpu(dtype, scale):
    logits = torch.randn(256, 128256, device="cuda").to(dtype)  # in bfloat16 with many ties
    labels = torch.randint(0, 128256, (256,), device="cuda")
    labels[::5] = -100
    everywhere = (scale * logits.cpu().float()).argmax(1)
    labels[1] = everywhere[1]  # one correct label
    output = cross_entropy(
        logits, labels, logit_scale=scale, return_token_accuracy=True, return_predicted_tokens=True
    )
    predicted = everywhere.where(labels.cpu() != -100, -1)
    assert torch.equal(output.predicted_tokens.cpu(), predicted)
    assert output.token_accuracy.item() == (predicted == labels.cpu()).sum() / (predicted >= 0).sum()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    vocab, tokens = 262144, 2**31 // 262144 + 3
    logits = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    last = torch.randn(3, vocab, device="cuda").bfloat16()
    logits[-3:] = last
    labels = torch.full((tokens,), -100, device="cuda")
    labels[-3:] = torch.tensor([5, 262143, 77], device="cuda")
    loss, grad = loss_and_grad(cross_entropy, logits.requires_grad_(), labels)
    small = loss_and_grad(F.cross_entropy, last.float().requires_grad_(), labels[-3:])
    torch.testing.assert_close(loss, small[0])
    torch.testing.assert_close(grad[-3:].float(), small[1], rtol=2**-8, atol=1e-9)
    assert grad[:-3].count_nonzero() == 0


@pytest.mark.gpu
def test_an_invalid_label_on_a_gpu_ends_the_program():
    program = (
        "import torch; from liger_models.kernels import cross_entropy as f; x = torch.zeros(4, 8).cuda()\n"
        "print(float(f(x, torch.tensor([0, 8, 1, 2]).cuda())))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stdout == ""
    assert "assert" in result.stderr
