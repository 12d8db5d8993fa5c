"""Training of stacked layers of experts: tensors kept for the backward pass, and routers' losses in the
model's loss, under recomputation, sharding and compilation.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

import liger_models.layers.experts.moe as moe
import liger_models.layers.experts.router as router
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.parts.norm import LigerRMSNorm
from liger_models.layers.recompute.activation_memory import LEVELS, keep_recipes, recompute
from liger_models.layers.sequences.router_loss import router_loss
from liger_models.layers.sequences.routing_decisions import in_backward_pass
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MoESpec, SparseMixerSpec

TOKENS, HIDDEN = 40, 16


class Layer(nn.Module):
    """A norm and a mixture of experts, as a block has them."""

    def __init__(self, spec: MoESpec):
        super().__init__()
        self.norm, self.mlp = LigerRMSNorm(HIDDEN), MixtureOfExperts(HIDDEN, spec)

    def forward(self, x, sequences):
        return x + self.mlp(self.norm(x), sequences)


@pytest.fixture
def make_layers(randomised, moe_spec):
    return lambda count, spec=moe_spec: randomised(nn.ModuleList([Layer(spec) for _ in range(count)]))


@pytest.fixture
def process_group():
    """A group of only this process, which suffices to see how sharding affects a module's arguments and
    parameters.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sequences_of(tokens: int) -> Sequences:
    return Sequences.from_call((1, tokens), torch.device("cpu"))


def loss_of(layers, x, level="all"):
    """The loss of a stack of layers, their routers' included."""
    sequences = sequences_of(len(x))
    for layer in layers:
        if level == "checkpoint":
            x = recompute(layer, x, sequences)
        else:
            with keep_recipes() if level == "lean" else contextlib.nullcontext():
                x = layer(x, sequences)
    return x.square().sum() + router_loss(sequences.notes.router_logits.take(), layers[0].mlp.spec)


def run(layers, x, level="all") -> list[torch.Tensor]:
    """The loss and every gradient."""
    x = x.clone().requires_grad_()
    loss = loss_of(layers, x, level)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *layers.parameters()])]


LATENT = MoESpec(8, 2, 12, "relu2", latent_size=10, latent_bias=True, aux_loss_coef=0.3)


@pytest.mark.parametrize("latent", [False, True])
def test_every_level_of_activation_memory_gives_the_same_bits(latent, form, make_layers):
    layers = make_layers(1 if form == "triton" else 2, **({"spec": LATENT} if latent else {}))
    x = torch.randn(4 if form == "triton" else TOKENS, HIDDEN)
    expected = run(layers, x, "all")
    for level in ("lean", "checkpoint"):  # a layer by itself knows no other
        for a, b in zip(run(layers, x, level), expected, strict=True):
            assert torch.equal(a, b)


def layer_again(layer, x, sequences):
    return recompute(layer, x, sequences)


def reentrant(layer, x, sequences):
    return checkpoint(layer, x, sequences, use_reentrant=True)


def not_reentrant(layer, x, sequences):
    return checkpoint(layer, x, sequences, use_reentrant=False)


def both_in_one(layer, x, sequences):
    """A checkpoint in a checkpoint."""
    return checkpoint(lambda x: recompute(layer, x, sequences), x, use_reentrant=False)


@pytest.fixture
def choices(monkeypatch):
    """The experts that each run of a layer computed; logits are others in a backward pass."""
    seen = []
    compute, product = moe.moe_experts, router.project

    def watched(x, weights, experts, *rest, **options):
        seen.append(experts)
        return compute(x, weights, experts, *rest, **options)

    def disturbed(x, weight, bias):
        logits = product(x, weight, bias)
        return logits + torch.randn_like(logits) if in_backward_pass() else logits

    monkeypatch.setattr(moe, "moe_experts", watched)
    monkeypatch.setattr(router, "project", disturbed)
    return seen


DRAWN = MoESpec(8, 2, 12, sparse_mixer=SparseMixerSpec(0.5), input_noise=0.1, aux_loss_coef=0.3)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("run_again", [layer_again, reentrant, not_reentrant, both_in_one])
def test_a_layer_that_runs_again_keeps_its_choice_whatever_its_logits_are(
    run_again, sharded, drawn, choices, make_layers, moe_spec, process_group
):
    layers = make_layers(2, DRAWN if drawn else replace(moe_spec, float32_router=False))
    if sharded:
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    x, sequences = torch.randn(TOKENS, HIDDEN, requires_grad=True), sequences_of(TOKENS)
    y = x
    for layer in layers:
        y = run_again(layer, y, sequences)
    first = list(choices)
    assert len(first) == 2
    y.square().sum().backward()
    again = choices[2:]
    assert len(again) == 2  # the second layer is recomputed before the first
    assert again[0].equal(first[1])
    assert again[1].equal(first[0])


@pytest.mark.parametrize(("level", "runs_of_routers"), [("mlp", 2), ("checkpoint", 4)])
def test_a_model_keeps_its_choices_at_every_level(level, runs_of_routers, choices, make_model, moe_spec):
    spec, runs = make_model(2).spec, []
    block = replace(spec.blocks[0], mlp=replace(moe_spec, float32_router=False))
    model = CausalLM(replace(spec, blocks=(block, block)), activation_memory=level)
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(lambda *_: runs.append(1))
    ids = torch.randint(61, (2, 9))
    model(ids, labels=ids).loss.backward()
    assert len(runs) == runs_of_routers
    assert len(choices) == 4
    assert choices[3].equal(choices[0])
    assert choices[2].equal(choices[1])


def test_a_layer_with_two_places_chooses_in_each(make_layers):
    """Which of them runs again cannot be seen: it chooses by its logits."""
    (layer,) = make_layers(1)
    x = torch.randn(TOKENS, HIDDEN)
    results = []
    for again in (False, True):
        layer.zero_grad()
        y, sequences = x.clone().requires_grad_(), sequences_of(TOKENS)
        for _ in range(2):
            y = recompute(layer, y, sequences) if again else layer(y, sequences)
        y.square().sum().backward()
        results.append([p.grad for p in layer.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class LowRank(nn.Module):
    """A parametrization of a stack that adds a term to each expert's matrix."""

    def __init__(self, stack):
        super().__init__()
        experts, outputs, inputs = stack.shape
        self.a = nn.Parameter(torch.randn(experts, 2, inputs) / 4)
        self.b = nn.Parameter(torch.randn(experts, outputs, 2) / 4)

    def forward(self, stack):
        return stack + self.b @ self.a


@pytest.mark.parametrize("level", LEVELS)
def test_low_rank_parametrizations_of_stacked_experts_have_the_gradients_of_the_sum(
    level, moe_spec, make_model
):
    spec = make_model(2).spec
    block = replace(spec.blocks[0], mlp=replace(moe_spec, activation="gelu"))
    model = CausalLM(replace(spec, blocks=(block, block)), activation_memory=level)
    torch.manual_seed(0)
    model.reset_parameters()
    ids, paths = torch.randint(61, (2, 9)), {}
    for layer in model.layers:
        for name in ("gate_up_proj", "down_proj"):
            paths[layer.mlp.experts, name] = LowRank(getattr(layer.mlp.experts, name))
    for (experts, name), path in paths.items():
        register_parametrization(experts, name, path)
    model(ids, labels=ids).loss.backward()
    found = [(path.a.grad, path.b.grad) for path in paths.values()]
    for experts, name in paths:
        remove_parametrizations(experts, name)  # keeps the sum
        experts.get_parameter(name).grad = None
    model(ids, labels=ids).loss.backward()
    for ((experts, name), path), (a, b) in zip(paths.items(), found, strict=True):
        whole = experts.get_parameter(name).grad
        torch.testing.assert_close(a, path.b.mT @ whole, rtol=1e-4, atol=1e-6)  # sums in another order
        torch.testing.assert_close(b, whole @ path.a.mT, rtol=1e-4, atol=1e-6)


class Dropping(Layer):
    """A layer that draws random numbers after its experts, too."""

    def forward(self, x, sequences):
        return nn.functional.dropout(super().forward(x, sequences), 0.3)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_random_numbers_are_drawn_once(level, randomised):
    layers = randomised(nn.ModuleList([Dropping(DRAWN) for _ in range(2)]))
    x, results = torch.randn(TOKENS, HIDDEN), []
    for each in ("all", level):
        torch.manual_seed(3)
        results.append(run(layers, x, each))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_with_recipes_the_norms_output_is_not_kept(form, make_layers):
    (layer,) = make_layers(1)
    x = torch.randn(6, HIDDEN, requires_grad=True)
    for recipes in (True, False):
        with keep_recipes() if recipes else contextlib.nullcontext():
            normed = layer.norm(x)
            y = layer.mlp(normed)
        alive = weakref.ref(normed)
        del normed
        gc.collect()
        assert y.requires_grad
        assert (alive() is None) == recipes


def test_the_routers_losses_match_transformers_over_all_layers(make_layers):
    reference = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    spec = MoESpec(num_experts=8, experts_per_token=3, intermediate_size=12, aux_loss_coef=0.02)
    layers = make_layers(3, spec)
    sequences = sequences_of(TOKENS)
    y = torch.randn(TOKENS, HIDDEN)
    for layer in layers:
        y = layer(y, sequences)
    noted = sequences.notes.router_logits.take()
    assert [logits.shape for logits in noted] == [(TOKENS, 8)] * 3
    weights = [layer.mlp.router.weight for layer in layers]
    expected = 0.02 * reference(tuple(noted), 8, 3)
    found = router_loss(noted, spec)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    z = torch.cat(noted).logsumexp(-1).square().mean()
    with_z = router_loss(noted, replace(spec, z_loss_coef=0.5))
    torch.testing.assert_close(with_z, expected + 0.5 * z, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="found no router logits"):
        router_loss([], spec)


def test_logits_are_recorded_only_for_a_loss_and_until_they_are_used(moe_spec):
    x, sequences = torch.randn(4, HIDDEN), sequences_of(4)
    quiet = MixtureOfExperts(HIDDEN, replace(moe_spec, aux_loss_coef=0.0, z_loss_coef=0.0))
    quiet(x, sequences)
    assert sequences.notes.router_logits.take() == []
    with_loss, sequences = MixtureOfExperts(HIDDEN, moe_spec), sequences_of(4)
    with_loss(x)
    with_loss(x, sequences)
    assert len(sequences.notes.router_logits.take()) == 1
    with_loss(x, sequences)
    assert sequences.notes.router_logits.take() == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_around_layers_keeps_the_routers_losses_or_is_refused(reentrant, make_layers):
    """A reentrant checkpoint runs its layers without gradients, so tensors that they return on the side have
    none.
    """
    layers, x = make_layers(2), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    sequences = sequences_of(TOKENS)

    def loss() -> torch.Tensor:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, sequences, use_reentrant=reentrant)
        return y.square().sum() + router_loss(sequences.notes.router_logits.take(), layers[0].mlp.spec)

    if reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss()
        with torch.no_grad():
            sequences = sequences_of(TOKENS)
            assert loss().isfinite()
        return
    expected = run(layers, x)
    found = torch.autograd.grad(loss(), [x, *layers.parameters()])
    for a, b in zip(found, expected[1:], strict=True):
        assert torch.equal(a, b)


def test_a_call_that_was_recomputed_and_never_differentiated_is_freed(make_layers):
    (layer,) = make_layers(1)
    sequences = sequences_of(4)
    y = recompute(layer, torch.randn(4, HIDDEN, requires_grad=True), sequences)
    sequences.notes.router_logits.take()
    alive = weakref.ref(sequences)
    del y, sequences
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("level", LEVELS)
def test_the_routers_losses_reach_every_layer_under_sharding(level, make_layers, process_group):
    layers = make_layers(3)
    x = torch.randn(TOKENS, HIDDEN)
    expected = run(layers, x, level)
    for layer in layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    for a, b in zip(run(layers, x, level), expected, strict=True):
        assert torch.equal(a.to_local() if isinstance(a, DTensor) else a, b)


def test_the_correction_bias_stays_float32_under_mixed_precision_and_is_not_trained(moe_spec, process_group):
    layer = MixtureOfExperts(HIDDEN, replace(moe_spec, shared_expert=None, shared_gate=False))
    assert not layer.router.correction_bias.any()
    assert "router.correction_bias" in layer.state_dict()
    bias = torch.randn(8)
    layer.router.correction_bias.copy_(bias)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=mixed)
    layer(torch.randn(5, HIDDEN)).sum().backward()
    assert torch.equal(layer.router.correction_bias, bias)
    trained = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert trained == {"router.weight", "experts.gate_up_proj", "experts.down_proj"}


def test_layers_and_their_routers_losses_trace_without_a_graph_break(make_layers):
    layers = make_layers(2)
    operands = [torch.randn(TOKENS, HIDDEN, requires_grad=True), *layers.parameters()]
    expected = torch.autograd.grad(loss_of(layers, operands[0]), operands)
    compiled = torch.compile(lambda x: loss_of(layers, x), fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(operands[0]), operands), expected, strict=True):
        # There every expert computes every token: the same sums in another order.
        assert (a - b).norm() <= 1e-5 * b.norm()
