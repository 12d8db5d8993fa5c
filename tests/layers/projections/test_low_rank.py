"""Linear layers with low-rank paths: values and gradients match the plain form; tensors that are kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.low_rank import (
    add_low_rank,
    low_rank_linear,
    plain_low_rank_linear,
    projection_of,
)
from liger_models.layers.projections.low_rank_plan import Adapter, Projection
from liger_models.layers.recompute.activation_memory import (
    carry_recipe,
    keep_recipes,
    output_is_ours,
    recompute,
)

TOKENS, WIDTH = (3, 5), 12
OUTS = (10, 4, 6)


def parameter(*shape, dtype=torch.float64, requires_grad=True):
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return nn.Parameter((torch.randn(*shape, dtype=torch.float64) * scale).to(dtype), requires_grad)


def make_input(dtype=torch.float64):
    return torch.randn(*TOKENS, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()


def make_adapter(out, rank=2, scale=1.7, dropout=0.0, dtype=torch.float64):
    return Adapter(parameter(rank, WIDTH, dtype=dtype), parameter(out, rank, dtype=dtype), scale, dropout)


def make_projection(out, *adapters, bias=True, trained=False, dtype=torch.float64):
    b = parameter(out, dtype=dtype, requires_grad=trained) if bias else None
    return Projection(parameter(out, WIDTH, dtype=dtype, requires_grad=trained), b, adapters)


def split(weight, *adapters):
    """Projections over the rows of one matrix."""
    rows = [nn.Parameter(part, requires_grad=False) for part in weight.detach().split(OUTS)]
    return [Projection(row, None, own) for row, own in zip(rows, adapters, strict=True)]


def one():
    return [make_projection(10, make_adapter(10))]


def without_bias():
    return [make_projection(10, make_adapter(10, rank=1), bias=False)]


def two_adapters():
    return [make_projection(10, make_adapter(10), make_adapter(10, rank=3, scale=-0.3))]


def trained():
    return [make_projection(10, make_adapter(10), trained=True)]


def dropped():
    return [
        make_projection(10, make_adapter(10, dropout=0.4), make_adapter(10), make_adapter(10, dropout=0.2))
    ]


def side_by_side():
    q, k, v = OUTS
    return [
        make_projection(q, make_adapter(q), make_adapter(q, rank=1)),
        make_projection(k, trained=True),
        make_projection(v, make_adapter(v, rank=3, dropout=0.5), bias=False),
    ]


def of_one_matrix():
    q, _, v = OUTS
    return split(parameter(sum(OUTS), WIDTH), (make_adapter(q),), (), (make_adapter(v, rank=3),))


def in_another_form():
    weight = nn.Parameter(torch.randint(-9, 9, (10, WIDTH)).double(), requires_grad=False)
    return [Projection(weight, parameter(10), (make_adapter(10),), lambda stored: stored / 8)]


FORMS = [
    one, without_bias, two_adapters, trained, dropped, side_by_side, of_one_matrix, in_another_form
]  # fmt: skip


def tensors_of(projections):
    found = []
    for projection in projections:
        found += [projection.weight, projection.bias]
        found += [tensor for adapter in projection.adapters for tensor in (adapter.a, adapter.b)]
    return [tensor for tensor in found if tensor is not None and tensor.requires_grad]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def projections(request):
    return request.param()


def run(function, x, projections):
    """The output and all gradients, for random gradients of the output."""
    torch.manual_seed(1)
    y = function(x, *projections)
    torch.manual_seed(2)
    return y, torch.autograd.grad(y, [x, *tensors_of(projections)], torch.randn_like(y))


def plain(x, *projections):
    return torch.cat([plain_low_rank_linear(x, projection, x.dtype) for projection in projections], dim=-1)


def test_gradients_match_finite_differences(projections):
    x = make_input()

    def function(x, *_):
        torch.manual_seed(1)  # the same elements are dropped every time
        return low_rank_linear(x, *projections)

    assert torch.autograd.gradcheck(function, (x, *tensors_of(projections)), fast_mode=True)


# Dropout draws different random numbers in the plain form.
@pytest.mark.parametrize("form", [form for form in FORMS if form not in (dropped, side_by_side)])
def test_it_equals_the_plain_form(form):
    projections = form()
    x = make_input()
    y, gradients = run(low_rank_linear, x, projections)
    expected, expected_gradients = run(plain, x, projections)
    # float64, sums of at most 20 terms in another order
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("in_place", [False, True])
def test_paths_are_added_to_a_layer_with_a_backward_pass_of_its_own(in_place):
    adapters = (make_adapter(10), make_adapter(10, rank=3, dropout=0.3))
    weight, x = parameter(10, WIDTH), make_input()

    def function(x, weight, *_):
        torch.manual_seed(1)
        return add_low_rank(x @ weight.T, x, adapters, in_place)

    both = [tensor for adapter in adapters for tensor in adapter[:2]]
    assert torch.autograd.gradcheck(function, (x, weight, *both), fast_mode=True)
    y = (x @ weight.T).detach().requires_grad_() * 1
    assert (add_low_rank(y, x, adapters, in_place) is y) == in_place


def test_outputs_that_cannot_be_modified_are_copied():
    x, adapter = make_input(), make_adapter(10)
    leaf = torch.randn(*TOKENS, 10, dtype=torch.float64, requires_grad=True)
    for y in (
        leaf,
        (leaf * 1).view(15, 10).view(*TOKENS, 10),
        torch.randn(10, 5, 3, dtype=torch.float64).permute(2, 1, 0),
    ):
        before = y.detach().clone()
        add_low_rank(y, x, [adapter], in_place=True).sum().backward()
        assert torch.equal(y, before)


@pytest.mark.parametrize("probability", [0.25, 1.0])
def test_dropout_drops_the_given_share_of_elements(probability):
    x = torch.ones(4000, WIDTH)
    a, b = torch.eye(WIDTH), torch.eye(WIDTH)
    weight = torch.zeros(WIDTH, WIDTH)
    y = low_rank_linear(x, Projection(weight, None, (Adapter(a, b, 1.0, probability),)))
    if probability == 1.0:
        assert not y.any()
        return
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - probability)).item()}
    # 48,000 draws: the share's standard deviation is below 0.002
    assert abs((y == 0).float().mean() - probability) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_adapters_have_gradients_that_were_summed_in_float32(dtype):
    """And the input is not cast to float32: the input itself is kept."""
    x = make_input(dtype)
    adapter = make_adapter(10, dtype=torch.float32)
    projection = make_projection(10, dtype=dtype)._replace(adapters=(adapter,))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = low_rank_linear(x, projection)
    assert y.dtype == dtype
    assert sum(tensor is x for tensor in saved) == 1
    assert not any(tensor.dtype == torch.float32 and tensor.shape[-1:] != (2,) and tensor is not adapter.a
                   for tensor in saved)  # fmt: skip
    dy = torch.randn(*TOKENS, 10).to(dtype)
    y.backward(dy)
    assert (x.grad.dtype, adapter.a.grad.dtype, adapter.b.grad.dtype) == (dtype, torch.float32, torch.float32)
    (t,) = (tensor for tensor in saved if tensor.shape == (15, 2))
    exact = dy.view(15, 10).double().T @ t.double()
    # The saved values are summed in float32: 15 terms, and the scale.
    bound = 20 * torch.finfo(torch.float32).eps
    assert (adapter.b.grad.double() - exact).norm() <= bound * exact.norm()


def test_autocast_keeps_the_input_as_it_is_and_gives_the_gradients_of_its_dtype():
    x = make_input(torch.float32)
    parts = [
        make_projection(out, make_adapter(out, dtype=torch.float32), dtype=torch.float32) for out in OUTS
    ]
    saved = []
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            y = low_rank_linear(x, *parts)
        expected = torch.cat([plain_low_rank_linear(x, part, torch.bfloat16) for part in parts], dim=-1)
    assert y.dtype == torch.bfloat16
    assert [tensor is x for tensor in saved if tensor.shape == x.shape] == [True]
    # a few bfloat16 roundings by 2^-9
    assert (y - expected).norm() <= 2**-7 * expected.norm()
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_a_rebuilt_input_is_kept_as_its_recipe_and_t_is_all_that_is_added():
    x, projections = make_input(), side_by_side()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        low_rank_linear(x, *projections)
    own = {id(tensor) for projection in projections for tensor in (projection.weight, projection.bias)}
    own |= {id(tensor) for p in projections for adapter in p.adapters for tensor in adapter[:2]}
    rank = sum(len(adapter.a) for p in projections for adapter in p.adapters)
    others = [tensor for tensor in saved if id(tensor) not in own and tensor is not x]
    assert [tuple(tensor.shape) for tensor in others] == [(15, rank)]

    made = []

    def double(z):
        made.append(z)
        return z * 2

    leaf = make_input()
    with keep_recipes():
        y = low_rank_linear(carry_recipe(double(leaf), double, leaf), *projections)
    y.sum().backward()
    assert len(made) == 2


def test_backward_may_run_twice_and_not_be_differentiated(projections):
    x = make_input()
    torch.manual_seed(1)
    y = low_rank_linear(x, *projections)
    over = [x, *tensors_of(projections)]
    first = torch.autograd.grad(y.sum(), over, retain_graph=True)
    again = torch.autograd.grad(y.sum(), over, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class Products(TorchDispatchMode):
    """Counts the products with a matrix of so many rows and of the input's width."""

    def __init__(self, rows):
        super().__init__()
        self.shape, self.count = sorted((rows, WIDTH)), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.name():
            self.count += any(isinstance(a, Tensor) and sorted(a.shape) == self.shape for a in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("again", [recompute, lambda f, x: checkpoint(f, x, use_reentrant=False)])
def test_a_layer_that_runs_again_does_not_repeat_its_product(again):
    projection = make_projection(41, make_adapter(41), bias=False)
    with Products(41) as products:
        y = again(lambda x: low_rank_linear(x * 1, projection), make_input())
    assert products.count == 1
    with Products(41) as products:
        y.sum().backward()
    assert products.count == 1  # dx


def test_layers_stored_one_after_another_are_one_product():
    projections, x = of_one_matrix(), make_input()
    with Products(sum(OUTS)) as products:
        low_rank_linear(x, *projections)
    assert products.count == 1
    apart = [p._replace(weight=nn.Parameter(p.weight.clone())) for p in projections]
    with Products(sum(OUTS)) as products:
        low_rank_linear(x, *apart)
    assert products.count == 0


def test_zero_tokens_work(projections):
    x = torch.randn(0, WIDTH, dtype=torch.float64, requires_grad=True)
    y = low_rank_linear(x, *projections)
    y.sum().backward()
    assert y.shape[0] == x.grad.shape[0] == 0
    assert all(not tensor.grad.any() for tensor in tensors_of(projections))


def test_frozen_tensors_have_no_gradient():
    projections, x = one(), make_input().detach()
    y = low_rank_linear(x, *projections)
    y.sum().backward()
    assert x.grad is None
    assert projections[0].weight.grad is None
    assert all(tensor.grad is not None for tensor in projections[0].adapters[0][:2])


def test_a_stored_weight_that_is_trained_is_refused():
    projection = make_projection(10, make_adapter(10), trained=True)._replace(dense=lambda stored: stored)
    with pytest.raises(ValueError, match="requires_grad"):
        low_rank_linear(make_input(), projection)


class WithPaths(Linear):
    """A layer that describes itself."""

    def __init__(self):
        super().__init__(WIDTH, 10)
        self.covered = True

    def low_rank_projection(self):
        return Projection(self.weight, self.bias) if self.covered else None


def test_a_layer_with_hooks_is_not_taken_over():
    assert projection_of(Linear(3, 4)) is not None
    assert projection_of(nn.Linear(3, 4)) is not None
    assert projection_of(nn.Embedding(3, 4)) is None
    own = WithPaths()
    assert projection_of(own) is not None
    assert output_is_ours(own)
    own.covered = False
    assert projection_of(own) is None
    assert not output_is_ours(own)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    assert projection_of(parametrized) is None
    for hook in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        hooked = copy.deepcopy(WithPaths())
        getattr(hooked, f"register_{hook}")(lambda *args: None)
        assert projection_of(hooked) is None, hook
    replaced = Linear(3, 4)
    replaced.forward = lambda x: x
    assert projection_of(replaced) is None
