"""linear_cross_entropy: chunked gradients against autograd through all logits, in float64."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from linear_problem import ASKED, H, V, doubled, loss_and_grads, problem
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models.kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_plain

module = importlib.import_module("liger_models.kernels.losses.linear_cross_entropy")
chunks = importlib.import_module("liger_models.kernels.losses._linear_chunks")
rows = importlib.import_module("liger_models.kernels.losses._cross_entropy_kernels")
EPS = torch.finfo(torch.float32).eps

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "class weight": {"class_weight": V, "label_smoothing": 0.3},
    "token weights": {"token_weights": True},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 2.5},
    "scale": {"logit_scale": 0.6},
    "temperature": {"temperature": 1.7},
    "all": {
        "class_weight": V,
        "token_weights": True,
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 3.0,
        "logit_scale": 1.4,
        "temperature": 0.8,
    },
}


def tensors_of(options, tokens):
    sizes = {"class_weight": V, "token_weights": tokens}
    return {k: torch.rand(sizes[k]) + 0.1 if k in sizes else v for k, v in options.items()}


def small_tiles(monkeypatch):
    """Split a row of 37 columns into at least three tiles, the last one partly empty."""
    monkeypatch.setattr(rows, "_LOSS_TILE", (8, 2))
    monkeypatch.setattr(rows, "_GRADIENT_TILE", (8, 2))


class Recorder(TorchDispatchMode):
    """Record the shapes of all matrix products and the size of the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[:2] if name == "mm" else args[1:3]
            self.products.append((a.shape[0], a.shape[1], b.shape[1]))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(
    ("options", "reduction"),
    [
        pytest.param(options, reduction, id=f"{name}-{reduction}")
        for i, (name, options) in enumerate(OPTIONS.items())
        for reduction in ("mean", ("none", "sum")[i % 2])
    ],
)
def test_float32_is_as_close_as_rounding_allows(implementation, monkeypatch, options, reduction):
    small_tiles(monkeypatch)
    x, weight, bias, labels = problem()
    options = tensors_of(options, 11) | {"reduction": reduction}
    loss, *grads = loss_and_grads(linear_cross_entropy, x, weight, bias, labels, **options)
    truth = loss_and_grads(linear_cross_entropy_plain, *doubled(x, weight, bias), labels, **options)
    assert loss.dtype == torch.float32
    # Logits are below 20, with a few roundings each, which exp turns into relative errors.
    for ours, true in zip((loss, *grads), truth, strict=True):
        atol = 16 * 20 * EPS * true.abs().max().item()
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=atol)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_make_no_difference_in_float64(monkeypatch, options, reduction):
    monkeypatch.setattr(chunks, "_FEWEST_TOKENS", 1)
    tokens = 300  # 290 valid tokens: two chunks of 128 and one of 34
    x, weight, bias, labels = problem(tokens, torch.float64, ignored=range(5, 300, 30))
    options = tensors_of(options, tokens) | {"reduction": reduction}
    with Recorder() as recorder:
        ours = loss_and_grads(linear_cross_entropy, x, weight, bias, labels, chunk_bytes=1, **options)
    assert [size[0] for size in recorder.products if size[1:] == (H, V)][:3] == [128, 128, 34]
    truth = loss_and_grads(linear_cross_entropy_plain, x, weight, bias, labels, **options)
    torch.testing.assert_close(ours, truth)


def test_the_kernels_work_in_chunks(implementation, monkeypatch):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 8)
    x, weight, bias, labels = problem(21)  # 19 valid tokens: chunks of 8, 8 and 3
    options = {"label_smoothing": 0.1, "token_weights": torch.rand(21)}
    ours = loss_and_grads(linear_cross_entropy, x, weight, bias, labels, **options)
    truth = loss_and_grads(linear_cross_entropy_plain, *doubled(x, weight, bias), labels, **options)
    torch.testing.assert_close([t.double() for t in ours], list(truth), rtol=1e-5, atol=1e-6)


def test_chunked_gradients_pass_gradcheck():
    x, weight, bias, labels = problem(dtype=torch.float64)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
    for reduction in ("none", "mean"):
        torch.autograd.gradcheck(
            lambda x, w, b, r=reduction: linear_cross_entropy(x, w, labels, b, reduction=r, **options),
            (x, weight, bias),
            fast_mode=True,
        )


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_logits_never_exist_all_at_once(monkeypatch, reduction):
    monkeypatch.setattr(chunks, "_FEWEST_TOKENS", 1)
    x, weight, _, labels = problem(1500)
    with Recorder() as recorder:
        loss_and_grads(linear_cross_entropy, x, weight, None, labels, reduction=reduction, chunk_bytes=1)
    assert recorder.largest == 1500 * H  # the gradient of x; a chunk of 128 tokens is smaller


def test_chunks_fit_their_bytes_and_are_even():
    row, sum_bytes = 128256 * 2, 128256 * 4096 * 2  # Llama-3-8B's head in bfloat16
    assert chunks._chunk_size(8192, row, sum_bytes, chunks.CHUNK_BYTES) == 8192
    size = chunks._chunk_size(32768, row, sum_bytes, chunks.CHUNK_BYTES)
    assert size == 4096
    assert size * row + sum_bytes <= chunks.CHUNK_BYTES
    assert chunks._chunk_size(5000, row, 0, 1) == 1024
    # dW is as large as the logits of 4,096 tokens. Accumulated in chunks it takes three times that in the
    # end, for its sum and the rounded copy; the logits of 8,192 tokens with dW alone take as much.
    assert chunks._chunk_size(8192, row, sum_bytes, 1) == 8192
    assert chunks._chunk_size(8193, row, sum_bytes, 1) == 2816
    assert chunks._chunk_size(12288, row, sum_bytes, 1) == 4096


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_only_required_gradients_are_computed(reduction):
    tokens, valid = 11, 9
    logits, for_x, for_weight = (valid, H, V), (valid, V, H), (V, valid, H)
    again = [logits] if reduction == "none" else []  # its backward pass recomputes the logits
    for wanted, products in (((True, False), [for_x]), ((False, True), [for_weight]), ((False, False), [])):
        x, weight, _, labels = problem(tokens)
        x.requires_grad_(wanted[0])
        weight.requires_grad_(wanted[1])
        with Recorder() as recorder:
            loss = linear_cross_entropy(x, weight, labels, reduction=reduction)
            if any(wanted):
                loss.sum().backward()
        assert recorder.products == [logits, *(again if any(wanted) else []), *products]
        assert [t.grad is not None for t in (x, weight)] == list(wanted)
    x.requires_grad_()
    with Recorder() as recorder, torch.no_grad():
        linear_cross_entropy(x, weight.requires_grad_(), labels, reduction=reduction)
    assert recorder.products == [logits]


def test_ignored_tokens_get_no_gradient(implementation):
    x, weight, bias, labels = problem()
    _, dx, _, _ = loss_and_grads(linear_cross_entropy, x, weight, bias, labels)
    assert ((dx != 0).any(1) == (labels != -100)).all()


def test_keeping_ignored_tokens_in_the_products_changes_nothing(implementation, monkeypatch):
    x, weight, bias, labels = problem()

    def results():
        outputs = linear_cross_entropy(x, weight, labels, bias, z_loss=0.1, **ASKED)
        return outputs, loss_and_grads(linear_cross_entropy, x, weight, bias, labels, z_loss=0.1)

    dropped = results()
    monkeypatch.setattr(module, "valid_rows", lambda *_: None)  # as in a CUDA graph
    torch.testing.assert_close(results(), dropped)


def test_backward_twice_gives_the_same_gradients(implementation):
    x, weight, bias, labels = problem()
    loss = linear_cross_entropy(x, weight, labels, bias)
    upstream = torch.tensor(1.7)
    first = torch.autograd.grad(loss, (x, weight, bias), upstream, retain_graph=True)
    before = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, (x, weight, bias), upstream)
    for a, b, c in zip(first, before, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(b, c, rtol=EPS, atol=0)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_gradients_accumulate_over_calls(implementation):
    x, weight, bias, labels = problem()
    single = loss_and_grads(linear_cross_entropy, x, weight, bias, labels)[1:]
    for _ in range(2):
        (0.5 * linear_cross_entropy(x, weight, labels, bias)).backward()
    torch.testing.assert_close([x.grad, weight.grad, bias.grad], [2 * g for g in single])


def test_a_gradient_becomes_grad_without_a_copy():
    _, weight, _, labels = problem()
    made = []
    original = module._chunked

    def chunked(*args, **kwargs):
        results = original(*args, **kwargs)
        made.append(results[4].data_ptr())
        return results

    x = torch.randn(11, H)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_chunked", chunked)
        (3 * linear_cross_entropy(x, weight, labels)).backward()
    assert weight.grad.data_ptr() == made[0]


@pytest.mark.parametrize(("reduction", "scale"), [("none", -0.7), ("sum", 1.4), ("mean", -0.7)])
def test_requested_extras_match_those_of_all_logits(implementation, monkeypatch, reduction, scale):
    small_tiles(monkeypatch)
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 4)  # 9 valid tokens: chunks of 4, 4 and 1
    x, weight, bias, labels = problem()
    with torch.no_grad():
        labels[2:4] = (scale * F.linear(x, weight, bias)).argmax(1)[2:4]  # two correct labels
    options = tensors_of(OPTIONS["all"], 11) | ASKED | {"reduction": reduction, "logit_scale": scale}
    ours = linear_cross_entropy(x, weight, labels, bias, **options)
    truth = linear_cross_entropy_plain(*doubled(x, weight), labels, *doubled(bias), **options)
    assert torch.equal(ours.predicted_tokens, truth.predicted_tokens)
    assert torch.equal(ours.token_accuracy, truth.token_accuracy)
    assert truth.token_accuracy.sum() > 0
    # As in the first test.
    for a, true in zip(ours[:2], truth[:2], strict=True):
        torch.testing.assert_close(a.double(), true, rtol=0, atol=16 * 20 * EPS * true.abs().max().item())
    just_loss = {k: v for k, v in options.items() if k not in ASKED}
    assert torch.equal(ours.loss, linear_cross_entropy(x, weight, labels, bias, **just_loss))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_returned_z_loss_has_its_own_gradient(implementation, monkeypatch, reduction):
    monkeypatch.setattr(chunks, "_chunk_size", lambda *_: 4)
    x, weight, bias, labels = problem()
    options = tensors_of(OPTIONS["all"], 11) | ASKED | {"reduction": reduction}
    upstream = torch.rand(2, 11 if reduction == "none" else 1, dtype=torch.float64).squeeze(1)

    def grads(function, x, weight, bias):
        outputs = function(x, weight, labels, bias, **options)[:2]
        return torch.autograd.grad(outputs, (x, weight, bias), [u.to(outputs[0].dtype) for u in upstream])

    truth = grads(linear_cross_entropy_plain, *doubled(x, weight, bias))
    for a, true in zip(grads(linear_cross_entropy, x, weight, bias), truth, strict=True):
        atol = 16 * 20 * EPS * true.abs().max().item()  # as in the first test
        torch.testing.assert_close(a.double(), true, rtol=0, atol=atol)


def test_a_returned_z_loss_costs_no_product_until_it_is_differentiated():
    x, weight, _, labels = problem()
    for differentiated, products in ((False, 3), (True, 6)):
        with Recorder() as recorder:
            output = linear_cross_entropy(x, weight, labels, z_loss=0.1, **ASKED)
            (output.loss + (output.z_loss if differentiated else 0)).backward()
        assert len(recorder.products) == products


def test_a_head_tied_to_the_embedding_adds_both_gradients(implementation):
    ids, labels = torch.randint(0, V, (9,)), torch.randint(0, V, (9,))
    weight = torch.randn(V, H, requires_grad=True)
    ours = torch.autograd.grad(linear_cross_entropy(weight[ids], weight, labels), weight)[0]
    truth = weight.detach().double().requires_grad_()
    true = torch.autograd.grad(F.cross_entropy(truth[ids] @ truth.T, labels), truth)[0]
    torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-6)


def test_only_grad_is_modified(implementation):
    x, weight, bias, labels = problem()
    before = [t.detach().clone() for t in (x, weight, bias, labels)]
    (2 * linear_cross_entropy(x, weight, labels, bias)).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias, labels), strict=True))


def test_shapes_and_strides_may_be_of_any_kind(implementation):
    wide = torch.randn(3, 4, 2 * H)
    x = wide[..., ::2].requires_grad_()
    weight = torch.randn(H, V).t().requires_grad_()
    labels = torch.randint(0, V, (4, 3)).t()
    for reduction in ("mean", "none"):
        ours = loss_and_grads(linear_cross_entropy, x, weight, None, labels, reduction=reduction)
        truth = loss_and_grads(
            linear_cross_entropy_plain, *doubled(x, weight), None, labels, reduction=reduction
        )
        torch.testing.assert_close([t.double() for t in ours], list(truth), rtol=1e-5, atol=1e-6)


def test_num_items_divides_the_sum(implementation):
    x, weight, bias, labels = problem()
    total = linear_cross_entropy(x, weight, labels, bias, reduction="sum")
    for count in (13, torch.tensor(13)):
        loss = linear_cross_entropy(x, weight, labels, bias, num_items=count)
        torch.testing.assert_close(loss, total / 13)


def test_without_a_valid_label_the_mean_is_nan_and_gradients_are_zero(implementation):
    x, weight, bias, labels = problem(ignored=range(11))
    for count, expected in ((None, math.nan), (4, 0.0)):
        loss = linear_cross_entropy(x, weight, labels, bias, num_items=count)
        torch.testing.assert_close(loss.detach(), torch.tensor(expected), equal_nan=True)
        grads = torch.autograd.grad(loss, (x, weight, bias))
        assert not any(grad.count_nonzero() for grad in grads)
    empty = linear_cross_entropy(x[:0], weight, labels[:0], reduction="sum")
    assert empty == 0
    assert torch.autograd.grad(empty, weight)[0].count_nonzero() == 0


def test_half_precision_sums_in_float32(monkeypatch):
    monkeypatch.setattr(chunks, "_FEWEST_TOKENS", 1)
    for dtype in (torch.bfloat16, torch.float16):
        x, weight, bias, labels = problem(1000, dtype)
        _, *ours = loss_and_grads(linear_cross_entropy, x, weight, bias, labels, chunk_bytes=1)
        truth = loss_and_grads(linear_cross_entropy_plain, *doubled(x, weight, bias), labels)[1:]
        eager = loss_and_grads(
            lambda x, w, y, b: F.cross_entropy(F.linear(x, w, b).float(), y), x, weight, bias, labels
        )[1:]
        for a, b, true in zip(ours, eager, truth, strict=True):
            error, eager_error = ((g.double() - true).norm() / true.norm() for g in (a, b))
            # Both round the logits alike; the other roundings are random.
            assert error <= 1.1 * eager_error


def test_float16_keeps_gradients_for_the_loss_scale():
    x, weight, _, labels = problem(tokens=64, ignored=())
    items = 10**8  # gradients around 1e-9 underflow in float16, unless the loss scale is applied first
    _, *truth = loss_and_grads(
        lambda *a: linear_cross_entropy_plain(*a, num_items=items) * 2.0**20,
        *doubled(x, weight),
        None,
        labels,
    )
    halves = [t.detach().half().requires_grad_() for t in (x, weight)]
    _, *ours = loss_and_grads(
        lambda *a: linear_cross_entropy(*a, num_items=items) * 2.0**20, *halves, None, labels
    )
    for a, true in zip(ours, truth, strict=True):
        # Three roundings to float16 (inputs, logits, dlogits) with eps 1e-3, some of them multiplied by
        # |logits|.
        assert (a.double() - true).norm() <= 20 * torch.finfo(torch.float16).eps * true.norm()


def test_autocast_sets_the_dtype_of_the_products():
    x, weight, bias, labels = problem()
    options = {"label_smoothing": 0.1, "class_weight": torch.rand(V)}
    with torch.autocast("cpu", torch.bfloat16):
        loss, *grads = loss_and_grads(linear_cross_entropy, x, weight, bias, labels, **options)
        _, *eager = loss_and_grads(linear_cross_entropy_plain, x, weight, bias, labels, **options)
    rounded = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    torch.testing.assert_close(loss, linear_cross_entropy(*rounded[:2], labels, rounded[2], **options))
    for ours, theirs in zip(grads, eager, strict=True):
        assert ours.dtype == torch.float32
        # Both round dlogits to bfloat16 (eps 2^-8); the reference rounds once more at the end.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * theirs.abs().max().item())
    with pytest.raises(TypeError, match="autocast"):
        linear_cross_entropy(x, weight.bfloat16(), labels)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_token_weights_of_any_precision_keep_the_operands_precision(implementation, reduction, dtypes):
    x, weight, bias, labels = problem(dtype=dtypes[0])
    options = {"token_weights": torch.rand(11).to(dtypes[1]), "reduction": reduction}
    loss, *grads = loss_and_grads(linear_cross_entropy, x, weight, bias, labels, **options)
    assert loss.dtype == dtypes[0]
    options["token_weights"] = options["token_weights"].double()
    true_loss, *truth = loss_and_grads(
        linear_cross_entropy_plain, *doubled(x, weight, bias), labels, **options
    )
    # Sums of at most 37 products of numbers of about one.
    tolerance = 37 * 16 * torch.finfo(dtypes[0]).eps
    for actual, true in zip((loss, *grads), (true_loss, *truth), strict=True):
        torch.testing.assert_close(actual.double(), true, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [-1, V, 2**40])
def test_label_outside_the_vocabulary_is_an_error_that_names_it(implementation, bad):
    x, weight, bias, labels = problem()
    labels[6] = bad
    with pytest.raises(IndexError, match=f"label {bad} at position 6 .* vocabulary of {V}"):
        linear_cross_entropy(x, weight, labels, bias)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(V, H + 1)}, ValueError, r"weight \[37, 9\]"),
        ({"bias": torch.ones(V + 1)}, ValueError, r"expected \[37\]"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, ValueError, r"expected one per token, \[11\]"),
        ({"labels": torch.zeros(11)}, TypeError, "int64 or int32"),
        ({"num_valid": 8}, ValueError, "num_valid is 8, but 9"),
        ({"reduction": "none", "num_items": 8}, ValueError, "num_items"),
        ({"class_weight": torch.ones(3)}, ValueError, r"expected \[37\]"),
    ],
)
def test_meaningless_options_are_refused(change, error, message):
    x, weight, bias, labels = problem()
    arguments = {"x": x, "weight": weight, "bias": bias, "labels": labels}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**(arguments | change))


def test_a_second_derivative_is_refused():
    x, weight, bias, labels = problem()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(x, weight, labels, bias, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_it_compiles_without_a_graph_break(reduction):
    x, weight, bias, labels = problem()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    options = {"reduction": reduction, "softcap": 3.0, "z_loss": 0.1}
    ours = loss_and_grads(compiled, x, weight, bias, labels, **options)
    torch.testing.assert_close(ours, loss_and_grads(linear_cross_entropy, x, weight, bias, labels, **options))
    outputs = [
        function(x, weight, labels, bias, **options, **ASKED) for function in (compiled, linear_cross_entropy)
    ]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(o.z_loss.sum(), (x, weight, bias)) for o in outputs))
    labels[3] = V
    with pytest.raises(IndexError):
        compiled(x, weight, labels, bias, **options)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_returned_z_losss_gradient_passes_gradcheck(reduction):
    x, weight, bias, labels = problem(4, torch.float64, ignored=(1,))
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "reduction": reduction}
    torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, labels, b, return_z_loss=True, **options)[:2],
        (x, weight, bias),
        fast_mode=True,
    )
