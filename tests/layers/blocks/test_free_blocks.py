"""Layers with one part and with two mixers: formula, levels of activation memory, generation, and plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from liger_models.generating.generation import generate
from liger_models.layers.memory import Step, StepMemory
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.recompute.activation_memory import LEVELS, RERUN
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
    SSDSpec,
)
from liger_models.training.observing.flops import StepFlops

HIDDEN = 32
ATTENTION = AttentionSpec(4, 2, 16, 0.25, RopeSpec(16, max_position_embeddings=64))
PRE_NORM = BlockSpec(ATTENTION, MLPSpec(40), NormSpec())
EXPERTS = MoESpec(4, 2, 12)
DELTA = GatedDeltaSpec(2, 4, 8, 8)
MAMBA = SSDSpec(4, 6, 2, 5, conv=3, dt_min=0.2, dt_max=1.5)
ONE = replace(PRE_NORM, topology="one_part", mlp=None)
MLP_ALONE = replace(PRE_NORM, topology="one_part", mixer=None)
SIDE_BY_SIDE = replace(PRE_NORM, topology="side_by_side", second_mixer=DELTA, residual_scale=0.5)
FREE = (
    ONE,
    MLP_ALONE,
    replace(ONE, mixer=DELTA),
    replace(MLP_ALONE, mlp=EXPERTS),
    SIDE_BY_SIDE,
    replace(ONE, mixer=MAMBA),
)


def model_of(*blocks):
    return CausalLM(ModelSpec(61, HIDDEN, blocks, NormSpec())).eval()


@pytest.fixture
def model(randomised):
    return randomised(model_of(*FREE))


def results(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_layers_compute_their_formulas(model):
    sequences = Sequences.of_lengths([5, 3], torch.device("cpu"))
    sequences.prepare_rotary(model.spec.ropes)
    x, residual = torch.randn(2, 8, HIDDEN)
    attends, mlp, delta, experts, both, mamba = model.layers
    for layer, part in (
        (attends, attends.self_attn),
        (mlp, mlp.mlp),
        (delta, delta.linear_attn),
        (experts, experts.mlp),
        (mamba, mamba.mamba),
    ):
        y = part(layer.norm(x + residual), sequences)
        found, stream = layer(x, residual, sequences)
        torch.testing.assert_close(found + stream, y + x + residual, rtol=1e-5, atol=1e-5)
    n = both.input_layernorm(x)
    h = x + 0.5 * (both.self_attn(n, sequences) + both.linear_attn(n, sequences))
    expected = h + 0.5 * both.mlp(both.post_attention_layernorm(h))
    torch.testing.assert_close(sum(both(x, None, sequences)), expected, rtol=1e-5, atol=1e-5)


def test_every_level_gives_the_same_loss_and_gradients(model):
    ids = torch.randint(61, (1, 12))
    model.set_activation_memory("all")
    loss, gradients = results(model, ids)
    for level in set(LEVELS) - {"all"}:
        model.set_activation_memory(level)
        found, others = results(model, ids)
        torch.testing.assert_close(found, loss)
        for name, gradient in gradients.items():
            assert (others[name] - gradient).norm() <= 1e-5 * gradient.norm(), (level, name)


def test_generation_with_a_cache_equals_the_whole(model):
    """Layers without a mixer have no room in the cache, and one with two mixers has both kinds."""
    cache = model.new_cache(2, 9)
    assert [len(room) for room in cache.layers] == [2, 0, 0, 0, 2, 0]
    assert [len(room) for room in cache.recurrent] == [0, 0, 2, 0, 2, 2]
    ids = torch.randint(61, (2, 5))
    found = generate(model, ids, max_new_tokens=4, temperature=0)
    for _ in range(4):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_with_two_mixers_keeps_what_both_keep(model, level):
    """As three layers of one part, but for one of their three norms."""
    attends, mlp, delta, _, both, _ = model.layers
    rows = sum(layer.activation_bytes(level, 2) for layer in (attends, mlp, delta))
    if level in RERUN:
        assert both.activation_bytes(level, 2) == rows / 3
    else:
        norm = attends.norm.activation_bytes(level, 2) + (2 * HIDDEN if level == "all" else 0)
        assert both.activation_bytes(level, 2) == rows - norm


def test_work_is_the_sum_of_the_parts_work(model):
    """One layer with two mixers costs as many operations as two layers with one, but for a norm."""
    apart = model_of(replace(ONE, residual_scale=0.5), replace(ONE, mixer=DELTA), MLP_ALONE)
    together = model_of(SIDE_BY_SIDE)
    lengths = torch.tensor([7, 4])
    assert StepFlops(apart).of(lengths, 9) == StepFlops(together).of(lengths, 9)
    planned = [StepMemory(one, Step(1, 64)) for one in (apart, together)]
    first, second = (sum(costs.forward for costs in plan.layers) for plan in planned)
    assert first == second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "one_part"}, "a mixer or an MLP; found both"),
        ({"mlp": None}, r"'pre_norm' need \['mlp'\]"),
        ({"second_mixer": DELTA}, "'pre_norm' do not support"),
        ({"branch_norm": NormSpec()}, r"'pre_norm' do not support \['branch_norm'\]"),
        ({"topology": "side_by_side", "second_mixer": ATTENTION}, "expected attention, and one with a state"),
    ],
)
def test_parts_that_a_topology_does_not_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(replace(PRE_NORM, **changes))


def test_mamba_2_is_its_formula_and_packed_documents_are_separate_ones(model):
    """in_proj, convolution with bias, scan, gate before the norm of each group, out_proj."""
    mixer, lengths = model.layers[-1].mamba, [5, 1, 70]
    x = torch.randn(sum(lengths), HIDDEN)
    packed = mixer(x, Sequences.of_lengths(lengths, torch.device("cpu")))
    for own, found in zip(x.split(lengths), packed.split(lengths), strict=True):
        z, xbc, dt = mixer.in_proj(own).split([24, 44, 4], dim=-1)
        padded = F.pad(xbc.T, (2, 0))
        weights = mixer.conv1d.weight[:, None], mixer.conv1d.bias
        xbc = F.silu(F.conv1d(padded, *weights, groups=44)).T
        v, b, c = xbc.split([24, 10, 10], dim=-1)
        v, b, c = v.unflatten(1, (4, 6)), b.unflatten(1, (2, 5)), c.unflatten(1, (2, 5))
        state, rows = torch.zeros(4, 6, 5), []
        step = F.softplus(dt + mixer.dt_bias).clamp(0.2, 1.5)
        for t in range(len(own)):
            keys, queries = (w[t].repeat_interleave(2, 0)[:, None] for w in (b, c))
            state = state * (-mixer.A_log.exp() * step[t]).exp()[:, None, None]
            state = state + (step[t][:, None] * v[t])[..., None] * keys
            rows.append((state * queries).sum(-1) + mixer.D[:, None] * v[t])
        gated = torch.stack(rows).flatten(1) * F.silu(z)
        groups = gated.unflatten(1, (2, 12))
        normed = (groups * (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(1)
        expected = mixer.out_proj(mixer.norm.weight * normed)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
