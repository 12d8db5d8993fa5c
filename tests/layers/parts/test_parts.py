"""The public modules, used by themselves in any model, compute the same as torch's own."""

from __future__ import annotations

import contextlib
import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from randomised import randomise
from torch import nn
from torch.utils import _pytree

from liger_models.kernels._dispatch import interpret
from liger_models.layers import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerReLUSquared,
    LigerReLUSquaredMLP,
    LigerRMSNorm,
    LigerSoftmax,
    LigerSwiGLUMLP,
    liger_rotary_pos_emb,
)
from liger_models.layers.model.output import CausalLMOutput
from liger_models.layers.recompute.activation_memory import keep_recipes

HIDDEN, INNER, VOCAB = 24, 40, 37


class TorchMLP(nn.Module):
    """The textbook gated MLP, its three projections apart."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(HIDDEN, INNER)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return randomise(module)


def assert_same_function(ours, theirs, shared, x, tolerance=1e-12):
    """Outputs and gradients agree; `shared` pairs our parameters with theirs."""
    cotangent = torch.randn_like(ours(x))
    results = []
    for module, parameters in ((ours, shared[0]), (theirs, shared[1])):
        own_x = x.clone().requires_grad_()
        out = module(own_x)
        gradients = torch.autograd.grad(out, [own_x, *parameters], cotangent)
        results.append((out, own_x, gradients))
    (out, _, gradients), (expected, _, expected_gradients) = results
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for found, gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found.view_as(gradient), gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    ours = randomised(LigerRMSNorm(HIDDEN, eps=1e-3, offset=offset)).double()
    theirs = nn.RMSNorm(HIDDEN, eps=1e-3, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight + offset)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    assert_same_function(ours, theirs, ([ours.weight], [theirs.weight]), x)


def test_rms_norm_with_a_residual_returns_the_sum_too():
    norm = randomised(LigerRMSNorm(HIDDEN))
    x, residual = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))


def test_a_fresh_rms_norm_multiplies_by_one():
    for offset in (0.0, 1.0):
        norm = LigerRMSNorm(HIDDEN, offset=offset)
        x = torch.randn(3, HIDDEN)
        torch.testing.assert_close(norm(x), F.rms_norm(x, (HIDDEN,), eps=1e-6), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias):
    ours = randomised(LigerLayerNorm(HIDDEN, eps=1e-3, bias=bias)).double()
    theirs = nn.LayerNorm(HIDDEN, eps=1e-3, bias=bias, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    assert_same_function(ours, theirs, (list(ours.parameters()), list(theirs.parameters())), x)


@pytest.mark.parametrize(
    ("ours_class", "activation"),
    [(LigerSwiGLUMLP, F.silu), (LigerGEGLUMLP, lambda x: F.gelu(x, approximate="tanh"))],
)
def test_gated_mlp(ours_class, activation):
    theirs = randomised(TorchMLP(activation)).double()
    ours = ours_class(HIDDEN, INNER, bias=True).double()
    names = ("weight", "bias")
    with torch.no_grad():
        for name in names:
            gate_up = torch.cat([getattr(theirs.gate, name), getattr(theirs.up, name)])
            getattr(ours.gate_up_proj, name).copy_(gate_up)
            getattr(ours.down_proj, name).copy_(getattr(theirs.down, name))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    shared = (list(ours.down_proj.parameters()), list(theirs.down.parameters()))
    assert_same_function(ours, theirs, shared, x)
    for name in names:
        packed = getattr(ours.gate_up_proj, name)
        ours.zero_grad()
        theirs.zero_grad()
        ours(x).square().sum().backward()
        theirs(x).square().sum().backward()
        expected = torch.cat([getattr(theirs.gate, name).grad, getattr(theirs.up, name).grad])
        torch.testing.assert_close(packed.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_relu_squared_mlp(bias):
    ours = randomised(LigerReLUSquaredMLP(HIDDEN, INNER, bias=bias)).double()
    up, down = ours.up_proj, ours.down_proj
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    parameters = list(ours.parameters())
    assert len(parameters) == (4 if bias else 2)
    assert_same_function(ours, lambda x: down(F.relu(up(x)) ** 2), (parameters, parameters), x)


@pytest.mark.parametrize("mlp", [LigerReLUSquaredMLP, LigerSwiGLUMLP])
def test_an_mlp_rebuilds_its_product_in_the_backward_pass(mlp):
    mlp = randomised(mlp(HIDDEN, INNER))
    x = torch.randn(5, HIDDEN, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()])
    products = []
    mlp.down_proj.register_forward_pre_hook(lambda _, args: products.append(weakref.ref(args[0])))
    with keep_recipes():
        y = mlp(x)
    assert products[0]() is None
    for a, b in zip(torch.autograd.grad(y.sum(), [x, *mlp.parameters()]), expected, strict=True):
        assert torch.equal(a, b)


def test_relu_squared():
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    assert_same_function(LigerReLUSquared(), lambda x: F.relu(x) ** 2, ([], []), x)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dim):
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    assert_same_function(LigerSoftmax(dim), lambda x: x.softmax(dim), ([], []), x)


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("batch_of_tables", [1, 3])
def test_rotary_turns_pairs_of_halves(heads_dim, batch_of_tables):
    q, k = torch.randn(3, 4, 7, 8, dtype=torch.float64), torch.randn(3, 2, 7, 8, dtype=torch.float64)
    angles = torch.randn(batch_of_tables, 7, 4, dtype=torch.float64)
    tables = [torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin())]
    given = (q, k) if heads_dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))
    found = liger_rotary_pos_emb(*given, *tables, unsqueeze_dim=heads_dim)
    for turned, x in zip(found, (q, k), strict=True):
        rotation = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.complex(x[..., :4], x[..., 4:]) * rotation
        expected = torch.cat([pairs.real, pairs.imag], dim=-1)
        expected = expected if heads_dim == 1 else expected.transpose(1, 2)
        torch.testing.assert_close(turned, expected, rtol=1e-12, atol=1e-12)


def test_rotary_of_a_part_of_each_head_leaves_the_rest():
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    angles = torch.randn(1, 7, 2)
    tables = [torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin())]
    for turned, x in zip(liger_rotary_pos_emb(q, k, *tables), (q, k), strict=True):
        (expected, _), rest = liger_rotary_pos_emb(x[..., :4], k[..., :4], *tables), x[..., 4:]
        assert torch.equal(turned, torch.cat([expected, rest], -1))


@pytest.mark.parametrize("compiled", [False, True])
def test_rotary_refuses_tables_of_another_width(compiled):
    run = partial = liger_rotary_pos_emb
    if compiled:
        partial = torch.compile(run, fullgraph=True, backend="eager")
        # Under fullgraph torch before 2.13 raises an error of its own here, without the message.
        run = torch.compile(run, backend="eager")
    q, k, angles = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(1, 7, 4)
    with pytest.raises((ValueError, RuntimeError), match="halves"):  # each angle once
        partial(q, k, angles.cos(), angles.sin())
    for width in (0, 7, 10):
        table = torch.randn(1, 7, width)
        with pytest.raises(ValueError, match="R even and at most the head size, 8"):
            run(q, k, table, table)


def labels_with_gaps(*shape: int):
    labels = torch.randint(0, VOCAB, shape)
    labels.view(-1)[::3] = -100
    return labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, smoothing):
    torch.manual_seed(0)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours, theirs = LigerCrossEntropyLoss(**options), nn.CrossEntropyLoss(**options)
    logits = torch.randn(12, VOCAB, dtype=torch.float64)
    target = labels_with_gaps(12)
    assert_same_function(lambda x: ours(x, target), lambda x: theirs(x, target), ([], []), logits)
    grid = torch.randn(2, VOCAB, 5, dtype=torch.float64)
    target_grid = labels_with_gaps(2, 5)
    assert_same_function(lambda x: ours(x, target_grid), lambda x: theirs(x, target_grid), ([], []), grid)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_linear_cross_entropy(reduction, bias):
    head = randomised(nn.Linear(HIDDEN, VOCAB, bias=bias)).double()
    ours = LigerFusedLinearCrossEntropyLoss(reduction=reduction)
    target = labels_with_gaps(12)
    x = torch.randn(12, HIDDEN, dtype=torch.float64)
    parameters = list(head.parameters())
    assert_same_function(
        lambda x: ours(head.weight, x, target, head.bias),
        lambda x: F.cross_entropy(head(x), target, reduction=reduction),
        (parameters, parameters),
        x,
    )


def test_losses_accept_another_ignored_label():
    target = torch.tensor([3, 1, 3, 0])
    logits = torch.randn(4, VOCAB)
    expected = F.cross_entropy(logits[[1, 3]], target[[1, 3]])
    torch.testing.assert_close(LigerCrossEntropyLoss(ignore_index=3)(logits, target), expected)
    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=3)
    torch.testing.assert_close(fused(torch.eye(VOCAB), logits, target), expected)


class PlainModel(nn.Module):
    """Anybody's model: an embedding, a norm, an MLP with a residual, another norm and a loss."""

    def __init__(self, liger: bool):
        super().__init__()
        self.liger = liger
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.before = LigerRMSNorm(HIDDEN) if liger else nn.RMSNorm(HIDDEN, eps=1e-6)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        if liger:
            self.mlp = LigerSwiGLUMLP(HIDDEN, INNER)
            self.mlp.gate_up_proj, self.mlp.down_proj = self.gate_up, self.down
        self.after = LigerLayerNorm(HIDDEN) if liger else nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids, target):
        x = self.embed(ids)
        if self.liger:
            x = self.after(x + self.mlp(self.before(x)))
            loss = LigerFusedLinearCrossEntropyLoss()
            return loss(self.head.weight, x.flatten(0, 1), target.flatten(), self.head.bias)
        gate, up = self.gate_up(self.before(x)).chunk(2, dim=-1)
        x = self.after(x + self.down(F.silu(gate) * up))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("interpreted", [False, True], ids=["plain", "triton"])
def test_a_plain_model_trains_the_same_with_our_parts(interpreted):
    if interpreted and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    theirs = randomised(PlainModel(liger=False))
    ours = PlainModel(liger=True)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    truth = copy.deepcopy(theirs).double()
    ids, target = torch.randint(0, VOCAB, (2, 5)), labels_with_gaps(2, 5)
    with interpret() if interpreted else contextlib.nullcontext():
        loss = ours(ids, target)
        loss.backward()
    expected = truth(ids, target)
    expected.backward()
    own = dict(ours.named_parameters())
    # float32 against float64, through about twenty operations
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for name, p in truth.named_parameters():
        assert (own[name].grad - p.grad).norm() <= 1e-5 * p.grad.norm(), name


# -- the output of a model


def test_an_output_is_a_dict_with_attributes():
    loss, logits = torch.tensor(1.5), torch.randn(2, 3, 4)
    output = CausalLMOutput(loss=loss, logits=logits)
    assert output.loss is output["loss"] is loss
    assert output.logits is output["logits"] is logits
    assert list(output) == ["loss", "logits"]
    assert isinstance(output, dict)


def test_an_output_holds_only_what_was_made():
    output = CausalLMOutput(logits=torch.zeros(1))
    assert list(output) == ["logits"]
    assert output.loss is None
    assert "loss" not in output
    with pytest.raises(AttributeError):
        output.attentions  # noqa: B018


def test_wrappers_find_and_replace_the_tensors_of_an_output():
    output = CausalLMOutput(loss=torch.tensor(2.0))
    doubled = _pytree.tree_map(lambda t: 2 * t, output)
    assert type(doubled) is CausalLMOutput
    assert doubled.loss == 4
    assert doubled.logits is None
