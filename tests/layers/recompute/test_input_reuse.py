"""Layers write over the outputs of their own projections, but not where a user's hook has seen them."""

import pytest
import torch

from liger_models.kernels.activations.gated_linear import gated_linear
from liger_models.layers.parts import mlp as parts_mlp
from liger_models.layers.parts.mlp import LigerSwiGLUMLP
from liger_models.layers.recompute.activation_memory import LEVELS, output_is_ours

pytestmark = pytest.mark.usefixtures("interpreted")


def test_a_tensor_kept_by_a_forward_hook_is_not_overwritten():
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(8, 12)
    kept = []
    mlp.gate_up_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    mlp(torch.randn(3, 8)).sum().backward()
    assert kept[0]._version == 0


def test_without_hooks_the_output_is_overwritten():
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(8, 12)
    seen = []
    product = mlp.gated_product
    mlp.gated_product = lambda gate_up, **options: (seen.append(gate_up), product(gate_up, **options))[1]
    mlp(torch.randn(3, 8)).sum().backward()
    assert seen[0]._version == 1


@pytest.mark.parametrize("level", ["lean", "all", "mlp", "checkpoint"])
def test_the_product_is_made_again_in_place_only_where_it_would_be_made_again(level, make_model, monkeypatch):
    """And never past a hook of `down`, or a weight that is not trained."""
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return gated_linear(*args, **options)

    monkeypatch.setattr(parts_mlp, "gated_linear", counted)
    model, ids = make_model(layers=3, activation_memory=level), torch.arange(3)[None]
    model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: None)
    model.layers[1].mlp.down_proj.weight.requires_grad_(False)
    model(ids, labels=ids).loss.backward()
    assert len(calls) == (level == "lean")


def test_a_global_hook_counts_too():
    module = torch.nn.Linear(2, 2)
    assert output_is_ours(module)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not output_is_ours(module)
    finally:
        handle.remove()


class KeepsItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


class ExponentialLinear(torch.nn.Linear):
    """A kind of linear layer, by its class, whose backward pass needs its output."""

    def forward(self, x):
        return KeepsItsOutput.apply(super().forward(x))


@pytest.mark.parametrize(
    ("part", "level"),
    [
        *(("self_attn.qkv_proj", level) for level in ("all", "lean", "checkpoint")),
        *(("mlp.gate_up_proj", level) for level in LEVELS),
    ],
)
def test_a_subclass_that_needs_its_output_has_the_same_gradients_at_every_level(part, level, make_model):
    ids = torch.arange(3)[None]
    gradients = []
    for reuse in (True, False):
        model = make_model(layers=1, activation_memory=level)
        parent, name = part.split(".")
        old = model.layers[0].get_submodule(part)
        new = ExponentialLinear(old.in_features, old.out_features)
        new.load_state_dict({key: value / 10 for key, value in old.state_dict().items()})
        if not reuse:
            new.register_forward_hook(lambda *args: None)  # now nothing is overwritten
        setattr(model.layers[0].get_submodule(parent), name, new)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def patched(linear):
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight)


def parametrized(linear):
    torch.nn.utils.parametrizations.orthogonal(linear)


@pytest.mark.parametrize(
    "change",
    [
        patched,
        parametrized,
        lambda linear: linear.register_full_backward_hook(lambda *args: None),
        lambda linear: linear.register_full_backward_pre_hook(lambda *args: None),
        lambda linear: linear.register_forward_hook(lambda *args: None),
    ],
)
def test_a_modified_linear_layer_keeps_its_output(change):
    linear = torch.nn.Linear(4, 4)
    assert output_is_ours(linear)
    change(linear)
    assert not output_is_ours(linear)


def test_a_weight_of_a_tensor_subclass_keeps_the_output():
    class Quantised(torch.Tensor):
        """A product with it computes and keeps whatever its class decides."""

    linear = torch.nn.Linear(4, 4)
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Quantised))
    assert not output_is_ours(linear)


class Wrapped(torch.nn.Module):
    """A layer around a projection, as adapters are."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        self.seen = self.base(x)
        return self.seen


def test_a_tensor_saved_by_a_wrapper_is_not_overwritten():
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(8, 12)
    mlp.gate_up_proj = wrapper = Wrapped(mlp.gate_up_proj)
    mlp(torch.randn(3, 8)).sum().backward()
    assert wrapper.seen._version == 0


def test_a_wrapper_whose_backward_needs_its_output_gives_the_gradient_of_the_formula():
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(8, 12)
    mlp.gate_up_proj = torch.nn.Sequential(mlp.gate_up_proj, torch.nn.Tanh())
    x = torch.randn(3, 8)
    mlp(x).sum().backward()
    gate, up = torch.tanh(x @ mlp.gate_up_proj[0].weight.T).chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    (product @ mlp.down_proj.weight.T).sum().backward(inputs=[weight := mlp.gate_up_proj[0].weight])
    # The sum of two equal gradients is twice the first, up to float32 rounding of about ten terms.
    with torch.no_grad():
        both = weight.grad.clone()
    weight.grad = None
    mlp(x).sum().backward()
    torch.testing.assert_close(2 * weight.grad, both, rtol=1e-5, atol=1e-6)
