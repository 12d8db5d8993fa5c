"""An MLP in tiles of the sequence is the MLP: no bit of its output, no more error in its gradients, no more
work, and no tensor as wide as the MLP of more than a tile.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_models.convert.checkpoints.layout import Layout, canonical_forms
from liger_models.layers.attention import backends, self_attention
from liger_models.layers.parts.mlp import make_mlp
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import split_projections
from liger_models.layers.recompute import tiles
from liger_models.layers.specs import MLPSpec

TILE, TOKENS, HIDDEN, INNER = 16, 77, 24, 40


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", TILE)


def gradients(mlp: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    mlp.zero_grad()
    y = mlp(leaf)
    y.backward(dy)
    found = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": leaf.grad, **found}


def inputs(dtype, tokens=TOKENS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for _ in "xy"]


KINDS = {
    "gated": MLPSpec(INNER, "silu", bias=True),
    "plain": MLPSpec(INNER, "gelu_tanh", bias=True, gated=False),
    "xielu": MLPSpec(INNER, "xielu", gated=False),
    "split": MLPSpec(INNER, "gelu", bias=True),
    "hooked": MLPSpec(INNER, "silu", bias=True),
    "frozen": MLPSpec(INNER, "silu", bias=True),
}


def make(kind, randomised, dtype) -> nn.Module:
    mlp = make_mlp(HIDDEN, KINDS[kind]).to(dtype)
    for part in mlp.children():  # beta and eps of xIELU keep their values
        nn.init.normal_(part.alpha_p) if kind == "xielu" and part is mlp.act_fn else randomised(part)
    if kind == "split":
        split_projections(mlp, Layout(root="").weight_map(canonical_forms(mlp)))
    if kind == "hooked":  # runs tile by tile through autograd
        mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.5)
    if kind == "frozen":
        mlp.down_proj.requires_grad_(False)
        mlp.gate_up_proj.bias.requires_grad_(False)
    return mlp


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_give_the_same_results_as_all_tokens_at_once(kind, randomised):
    mlp = make(kind, randomised, torch.float64)
    expected = gradients(mlp, *inputs(torch.float64))
    mlp.activation_memory = "tiled"
    found = gradients(mlp, *inputs(torch.float64))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # float64, sums over 77 tokens in another order
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    with torch.no_grad():
        y = mlp(inputs(torch.float64)[0].unflatten(0, (7, 11)))
    torch.testing.assert_close(y.flatten(0, 1), found["y"])


def test_gradients_in_bfloat16_are_as_accurate_as_without_tiles(randomised):
    """A weight's gradient is summed in float32 and rounded once, by at most 2^-9, in addition to the equal
    errors of its factors. Sums tile by tile in bfloat16 would be rounded many times.
    """
    mlp = make("gated", randomised, torch.bfloat16)
    x, dy = inputs(torch.bfloat16, tokens=1600)
    errors = {}
    for level in ("lean", "tiled"):
        mlp.activation_memory = level
        found = gradients(mlp, x, dy)
        truth = gradients(make_double(mlp), x.double(), dy.double())
        errors[level] = {name: (found[name].double() - truth[name]).norm() for name in truth}
    for name, error in errors["lean"].items():
        assert errors["tiled"][name] <= 1.02 * error, name


def make_double(mlp):
    double = make_mlp(HIDDEN, mlp.spec).double()
    double.load_state_dict(mlp.state_dict())
    return double


def test_hooked_layers_trained_in_bfloat16_run_on_all_tokens_at_once(randomised):
    """Its gradients would be summed in bfloat16, tile by tile."""
    mlp = make("hooked", randomised, torch.bfloat16)
    expected = gradients(mlp, *inputs(torch.bfloat16))
    mlp.activation_memory = "tiled"
    found = gradients(mlp, *inputs(torch.bfloat16))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Widest(TorchDispatchMode):
    """The largest tensor with as many columns as the MLP's inside."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] in (INNER, 2 * INNER):
                self.rows = max(self.rows, len(tensor))
        return out


@pytest.mark.parametrize("kind", ["gated", "plain", "split", "frozen"])
def test_tensors_as_wide_as_the_mlp_exist_for_one_tile_only(kind, randomised):
    mlp = make(kind, randomised, torch.float32)
    x, dy = inputs(torch.float32, tokens=160)
    rows = {}
    for level in ("lean", "tiled"):
        mlp.activation_memory = level
        with Widest() as widest:
            gradients(mlp, x, dy)
        rows[level] = widest.rows
    weights = max(2 * INNER, HIDDEN)  # their gradients have such columns too
    assert rows["lean"] == 160
    assert rows["tiled"] <= weights


class Products(TorchDispatchMode):
    """Counts the operations of matrix products. (torch's counter hooks into all modules, which then are no
    plain ones.)
    """

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.operations += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def test_a_layer_in_tiles_does_no_more_work_than_a_recomputed_one(make_model):
    model = make_model(kv_heads=4)
    ids = torch.randint(0, 61, (1, 60), generator=torch.Generator().manual_seed(0))
    operations, losses = {}, {}
    for level in ("checkpoint", "tiled", "offload"):
        model.set_activation_memory(level)
        with Products() as products:
            loss = model(ids, labels=ids).loss
            loss.backward()
        operations[level], losses[level] = products.operations, loss.detach()
    assert operations["tiled"] == operations["offload"] == operations["checkpoint"] > 0
    # float32, matrix products over different numbers of rows
    torch.testing.assert_close(losses["tiled"], losses["checkpoint"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["packed", "rows", "one row"])
def test_a_layer_with_heads_in_groups_equals_the_layer(form, make_model, monkeypatch):
    """Packed documents, here without a mask of their own, run as before."""
    monkeypatch.setattr(backends, "LONG", 40)
    pieces = []
    project = self_attention.project_pieces
    monkeypatch.setattr(
        self_attention, "project_pieces", lambda p, linear: (pieces.append(len(p)), project(p, linear))[1]
    )
    model = make_model(activation_memory="all").double()
    ids = torch.randint(0, 61, (1, 60) if form == "one row" else (3, 20))
    options = {"cu_seqlens": torch.tensor([0, 13, 60])} if form == "packed" else {}
    gradients = {}
    for level in ("all", "tiled", "offload"):
        model.set_activation_memory(level)
        model.zero_grad()
        model(ids, labels=ids, **options).loss.backward()
        gradients[level] = [p.grad for p in model.parameters()]
    assert set(pieces) == {1 if form == "packed" else 2}
    for level in ("tiled", "offload"):
        for found, expected in zip(gradients[level], gradients["all"], strict=True):
            # float64, sums over 60 tokens in another order
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "hooked", "frozen"])
def test_a_projection_of_pieces_equals_the_projection_of_the_whole(kind):
    torch.manual_seed(0)
    linear = Linear(24, 7).double().requires_grad_(kind != "frozen")
    if kind == "hooked":
        linear.register_forward_hook(lambda module, args, output: output * 1.5)
    pieces = [torch.randn(50, width, dtype=torch.float64).requires_grad_() for width in (8, 5, 11)]
    dy = torch.randn(50, 7, dtype=torch.float64)
    wanted = [*pieces, *(p for p in linear.parameters() if p.requires_grad)]
    results = []
    for y in (tiles.project_pieces(pieces, linear), linear(torch.cat(pieces, 1))):
        results.append((y, *torch.autograd.grad(y, wanted, dy)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_differentiating_twice_raises(randomised):
    mlp = make("gated", randomised, torch.float32)
    mlp.activation_memory = "tiled"
    x = inputs(torch.float32)[0].requires_grad_()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(mlp(x).sum(), x, create_graph=True)
