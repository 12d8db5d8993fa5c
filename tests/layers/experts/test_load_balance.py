"""The correction bias of routers follows their load: counted once, over all forward passes and ranks of a
step.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_models import update_correction_bias
from liger_models.kernels._dispatch import interpret
from liger_models.layers.experts.router import Router
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

HIDDEN, EXPERTS, CHOSEN, RATE = 16, 8, 3, 0.01
RANK = Path(__file__).with_name("load_balance_rank.py")


@pytest.fixture
def experts(moe_spec) -> MoESpec:
    return replace(moe_spec, aux_loss_coef=0.0, z_loss_coef=0.0)


@pytest.fixture
def router(randomised, experts) -> Router:
    return randomised(Router(HIDDEN, experts))


@pytest.fixture
def make_model(randomised, experts):
    """Two layers of experts after a dense one."""

    def make(**options) -> CausalLM:
        attention = AttentionSpec(2, 2, 8, 8**-0.5)
        blocks = [BlockSpec(attention, inner, NormSpec()) for inner in (MLPSpec(12), experts, experts)]
        return randomised(CausalLM(ModelSpec(31, HIDDEN, tuple(blocks), NormSpec()), **options))

    return make


def routers_of(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def moved(bias: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    """The bias after a step, by the definition, expert by expert."""
    mean = load.double().mean()
    signs = [0 if own == mean else 1 if own < mean else -1 for own in load.double()]
    return bias + torch.tensor(signs) * torch.tensor(RATE)


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_the_bias_moves_against_the_load_of_all_passes_since_the_last_call(form, router):
    if form == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    before = router.correction_bias.clone()
    chosen = []
    with interpret() if form == "triton" else contextlib.nullcontext():
        for tokens in (5, 9):
            chosen.append(router(torch.randn(tokens, HIDDEN))[2])
    load = torch.cat(chosen).flatten().long().bincount(minlength=EXPERTS)
    assert load.max() > load.min()
    assert torch.equal(router.load, load)
    update_correction_bias(router, RATE)
    assert torch.equal(router.correction_bias, moved(before, load))
    after = router.correction_bias.clone()
    update_correction_bias(router, RATE)  # nothing has been routed since
    assert torch.equal(router.correction_bias, after)


def test_an_expert_with_the_mean_load_keeps_its_bias(router):
    router.correction_bias.zero_()
    router.load = torch.tensor([4, 4, 2, 6, 4, 4, 4, 4])
    update_correction_bias(router, RATE)
    assert router.correction_bias.tolist() == pytest.approx([0, 0, RATE, -RATE, 0, 0, 0, 0])
    router.load = torch.tensor([2**40] * 7 + [2**40 - 1])  # float32 would find all equal
    update_correction_bias(router, RATE)
    assert router.correction_bias.tolist() == pytest.approx([-RATE, -RATE, 0, -2 * RATE, *[-RATE] * 3, RATE])


@pytest.mark.parametrize("level", LEVELS)
def test_a_pass_counts_each_token_once_though_layers_run_again(level, make_model):
    model = make_model(activation_memory=level)
    ids = torch.randint(31, (2, 9))
    model(ids, labels=ids).loss.backward()
    assert [router.load.sum() for router in routers_of(model)] == [ids.numel() * CHOSEN] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_under_torchs_checkpoint_counts_each_token_once(reentrant, router):
    x = torch.randn(6, HIDDEN, requires_grad=True)
    checkpoint(lambda x: router(x)[1], x, use_reentrant=reentrant).square().sum().backward()
    assert x.grad is not None
    assert router.load.sum() == 6 * CHOSEN


def test_padding_and_evaluation_do_not_count(make_model):
    model = make_model()
    ids, mask = torch.randint(31, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 4:] = 0
    model.eval()(ids, attention_mask=mask)
    assert [router.load for router in routers_of(model)] == [None, None]
    model.train()(ids, attention_mask=mask)
    assert [router.load.sum() for router in routers_of(model)] == [mask.sum() * CHOSEN] * 2


def test_without_a_bias_nothing_is_counted_or_moved(randomised, experts):
    router = randomised(Router(HIDDEN, replace(experts, correction_bias=False)))
    router(torch.randn(4, HIDDEN))
    assert router.load is None
    update_correction_bias(router)


def test_the_bias_is_part_of_the_state_and_the_load_is_not(make_model):
    model = make_model()
    before = model.state_dict().keys()
    model(torch.randint(31, (1, 5)))
    assert model.state_dict().keys() == before
    assert sum(name.endswith("correction_bias") for name in before) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_dtype_keeps_biases_no_narrower_than_float32(dtype, make_model):
    """Half of a bfloat16's distance from 1 to the next below is 2^-9, more than the rate: no step would
    change it.
    """
    model = make_model()
    for router in routers_of(model):
        router.correction_bias.fill_(1.0)
        router.load = torch.tensor([8, 0, 0, 0, 0, 0, 0, 0])
    model.to(dtype)
    update_correction_bias(model, 0.001)
    for router in routers_of(model):
        assert router.weight.dtype == dtype
        assert router.correction_bias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert router.correction_bias.tolist() == pytest.approx([0.999, *[1.001] * 7])
    assert next(iter(routers_of(model.to("meta")))).correction_bias.is_meta


def test_step_by_step_the_load_becomes_even(randomised, experts):
    """Scores lie in (0, 1): within 1 / RATE steps the bias can put any expert before any other."""
    router = randomised(Router(HIDDEN, experts))
    router.correction_bias.copy_(torch.linspace(0, 0.5, EXPERTS))
    x = torch.randn(256, HIDDEN)
    mean = 256 * CHOSEN / EXPERTS

    def excess() -> float:
        load = router(x)[2].flatten().long().bincount(minlength=EXPERTS)
        return load.max().item() / mean

    assert excess() > 2
    for _ in range(100):
        router(x)
        update_correction_bias(router, RATE)
    assert excess() < 1.2  # a step of the bias reorders the experts of a few tokens


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_an_invalid_rate_is_named(rate, router):
    with pytest.raises(ValueError, match="expected a number of 0 or more"):
        update_correction_bias(router, rate)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_change_the_bias_like_one_process_with_both_batches(make_model, tmp_path):
    model = make_model()
    batches = [torch.randint(31, (1, 9)) for _ in range(4)]  # two per rank
    torch.save({"spec": model.spec, "state": model.state_dict(), "batches": batches}, tmp_path / "task.pt")
    for ids in batches:
        model(ids, labels=ids).loss.backward()
    update_correction_bias(model, RATE)
    for found in run_ranks(RANK, tmp_path, str(RATE)):
        for router, bias in zip(routers_of(model), found, strict=True):
            assert torch.equal(bias, router.correction_bias)
