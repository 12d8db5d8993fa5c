"""A factor of each branch is part of its last product, where that is a plain linear layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from liger_models.layers.blocks.block import Block
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.projections import linear
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SSDSpec,
)

ATTENTION = AttentionSpec(2, 2, 8, 0.35, RopeSpec(8, max_position_embeddings=64))
STATES = SSDSpec(heads=4, head_dim=4, groups=2, state=4, conv=3, norm_eps=1e-5)
PRE_NORM = BlockSpec(ATTENTION, MLPSpec(24), NormSpec())
BLOCKS = {
    "attention and an MLP": PRE_NORM,
    "an MLP with biases": replace(PRE_NORM, mlp=MLPSpec(24, bias=True)),
    "a state space": replace(PRE_NORM, mixer=STATES),
    "one part": BlockSpec(None, MLPSpec(24, "relu2", gated=False), NormSpec(), "one_part"),
    "other factors": replace(PRE_NORM, branch_scales=(0.5, 1.0, 2.0)),
    "a mixer without factors": replace(PRE_NORM, mixer=GatedDeltaSpec(2, 2, 4, 4, 3, 1e-5)),
}
AS_ONE = {"attention and an MLP": 2, "an MLP with biases": 1, "a state space": 2, "one part": 1}


def step(spec, level="lean", change=lambda model: None):
    torch.manual_seed(0)
    model = CausalLM(ModelSpec(32, 16, (spec,), NormSpec()), activation_memory=level)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / 4)
    change(model)
    ids = torch.arange(10)[None]
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def scaled_apart(monkeypatch):
    monkeypatch.setattr("liger_models.layers.blocks.block._WITH_SCALES", ())


@pytest.fixture
def multiplied(monkeypatch):
    """Branches whose factor is an operation of its own."""
    calls, scaled = [], Block._scaled
    monkeypatch.setattr(Block, "_scaled", lambda self, x: calls.append(self) or scaled(self, x))
    return calls


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *((name, "lean") for name in BLOCKS),
        *(("attention and an MLP", level) for level in ("mlp", "checkpoint")),
    ],
)
def test_loss_and_gradients_are_those_of_branches_that_are_multiplied(name, level, interpreted, monkeypatch):
    """With a power of two, bit for bit."""
    spec = replace(BLOCKS[name], residual_scale=0.25)
    loss, gradients = step(spec, level)
    plain, _ = step(replace(spec, residual_scale=1.0), level)
    scaled_apart(monkeypatch)
    expected, expected_gradients = step(spec, level)
    assert torch.equal(loss, expected)
    assert not torch.equal(loss, plain)
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[parameter]), parameter


@pytest.mark.parametrize("name", BLOCKS)
def test_plain_linear_layers_multiply(name, interpreted, monkeypatch, multiplied):
    counted = []
    monkeypatch.setattr(
        linear, "scaled_linear", lambda *args: counted.append(args) or args[0] @ args[1].t() * args[2]
    )
    step(replace(BLOCKS[name], residual_scale=0.25))
    of_mixers = {"attention and an MLP": 1, "an MLP with biases": 1, "a state space": 1}
    of_mixers["a mixer without factors"] = 0
    assert len(counted) == of_mixers.get(name, 0)
    assert len(multiplied) == {"other factors": 2, "a mixer without factors": 1}.get(name, 0)


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.down_proj", "self_attn", "mlp"])
def test_a_hook_sees_the_unscaled_output(part, interpreted, monkeypatch):
    """And its change of the output counts."""
    spec, seen = replace(PRE_NORM, residual_scale=0.25), []

    def double(module, args, y):
        seen.append(y.detach())
        return 2 * y

    def change(model: nn.Module) -> None:
        model.layers[0].get_submodule(part).register_forward_hook(double)

    loss, gradients = step(spec, change=change)
    scaled_apart(monkeypatch)
    expected, expected_gradients = step(spec, change=change)
    assert torch.equal(*seen)
    assert torch.equal(loss, expected)
    assert all(torch.equal(g, expected_gradients[name]) for name, g in gradients.items())
