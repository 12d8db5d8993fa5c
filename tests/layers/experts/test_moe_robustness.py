"""A mixture of experts where tokens are few, or all alike, or broken, and where experts are many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from rounding import beyond_bound

from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.specs import MLPSpec, MoESpec

HIDDEN, INNER, EXPERTS, CHOSEN = 16, 12, 8, 2
PLAIN = MoESpec(EXPERTS, CHOSEN, INNER)
RANK = Path(__file__).with_name("moe_rank.py")


def by_hand(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Token by token, of a softmax router without anything else, in float64."""
    router, experts = layer.router.weight.double(), layer.experts
    rows = []
    for token in x.double():
        shares = (router @ token).softmax(0)
        chosen = shares.topk(layer.spec.experts_per_token).indices
        row = torch.zeros_like(token)
        for e in chosen:
            gate, up = (experts.gate_up_proj[e].double() @ token).chunk(2)
            row = row + shares[e] / shares[chosen].sum() * (
                experts.down_proj[e].double() @ (F.silu(gate) * up)
            )
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("num_experts", [8, 64, 128, 256, 512])
def test_of_8_to_512_experts_each_token_has_its_own(num_experts, randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, replace(PLAIN, num_experts=num_experts, experts_per_token=5)))
    x = torch.randn(7, HIDDEN)
    found = layer(x)
    # A few float32 roundings, in sums of HIDDEN and INNER elements.
    torch.testing.assert_close(found.double(), by_hand(layer, x), rtol=1e-5, atol=1e-5)
    touched = torch.autograd.grad(found.sum(), layer.experts.down_proj)[0].flatten(1).any(1)
    assert torch.equal(touched.nonzero()[:, 0], layer.router(x)[2].unique().long())


@pytest.mark.parametrize("favourites", [(3, 5), (0, 7)])
def test_all_tokens_on_the_same_experts_leave_a_zero_gradient_to_the_others(favourites, form, randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, replace(PLAIN, router_bias=True)))
    with torch.no_grad():
        layer.router.bias[list(favourites)] += 100
    x = torch.randn(5, HIDDEN, requires_grad=True)
    y = layer(x)
    assert set(layer.router(x)[2].unique().tolist()) == set(favourites)
    y.square().sum().backward()
    for stack in (layer.experts.gate_up_proj, layer.experts.down_proj):
        assert [bool(matrix.any()) for matrix in stack.grad] == [e in favourites for e in range(EXPERTS)]
    assert x.grad.flatten().isfinite().all()


def test_without_tokens_every_parameter_has_a_zero_gradient(form, randomised):
    layer = randomised(MixtureOfExperts(HIDDEN, replace(PLAIN, shared_expert=MLPSpec(20), shared_gate=True)))
    layer(torch.zeros(0, HIDDEN, requires_grad=True)).sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert not p.grad.any(), name


def test_equal_scores_choose_as_transformers_does(randomised):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = pytest.importorskip("transformers").MixtralConfig(
        hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3
    )
    theirs = mixtral.MixtralTopKRouter(config)
    layer = randomised(MixtureOfExperts(HIDDEN, replace(PLAIN, experts_per_token=3)))
    rows = torch.randint(-1, 2, (EXPERTS // 2, HIDDEN)).float().repeat(2, 1)  # each expert has a twin
    for router in (theirs, layer.router):
        router.weight.data.copy_(rows)
    x = torch.randint(-1, 2, (40, HIDDEN)).float()  # its products are exact
    x[0] = 0  # all experts tie
    assert torch.equal(layer.router(x)[2].long(), theirs(x)[2])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_nan_in_a_token_reaches_only_that_token_and_its_gradients(scores, form, randomised):
    """Other tokens stay as they are, and so do their gradients; of the parameters the router's is lost, and
    those of the experts that the token was sent to.
    """
    layer = randomised(MixtureOfExperts(HIDDEN, replace(PLAIN, score=scores)))
    clean = torch.randn(6, HIDDEN)
    broken = clean.clone()
    broken[2] = torch.nan
    others, results = torch.arange(6) != 2, []
    for x in (clean, broken):
        layer.zero_grad()
        x.requires_grad_()
        y = layer(x)
        y.sum().backward()
        results.append((y[others].detach(), x.grad[others], layer.experts.down_proj.grad.clone(), y))
    for found, expected in zip(results[1][:2], results[0][:2], strict=True):
        # Products of other sizes sum in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert results[1][3][2].isnan().all()
    sent_to = set(layer.router(broken)[2][2].tolist())
    lost = {e for e, matrix in enumerate(results[1][2]) if matrix.isnan().any()}
    assert lost == sent_to
    assert layer.router.weight.grad.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(("shared", "tokens"), [(False, 300), (True, 300), (False, 4000)])
def test_a_cuda_graph_captures_a_layer_forward_and_backward(shared, tokens, randomised):
    shape = {"shared_expert": MLPSpec(128), "shared_gate": True} if shared else {}
    spec = MoESpec(16, 4, 128, score="sigmoid", correction_bias=True, float32_router=True, **shape)
    layer = randomised(MixtureOfExperts(256, spec)).to("cuda", torch.bfloat16)
    layer.router.correction_bias = layer.router.correction_bias.float()
    x = torch.randn(tokens, 256, device="cuda").bfloat16().requires_grad_()
    upstream = torch.randn(tokens, 256, device="cuda").bfloat16()
    operands = [x, *layer.parameters()]

    def run():
        y = layer(x)
        return [y, *torch.autograd.grad(y, operands, upstream)]

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    layer.router.load = None
    run()  # creates the counts of the load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))  # tokens go to other experts
    layer.router.load.zero_()
    graph.replay()
    assert layer.router.load.sum() == tokens * 4  # the captured pass counts at each replay
    for found, expected in zip(captured, run(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_experts_without_tokens_on_a_rank_train_as_in_one_process(wrapper, randomised, tmp_path):
    """Each rank's tokens go to two experts of its own, and to two of the eight no token goes at all."""
    layer = randomised(MixtureOfExperts(HIDDEN, replace(PLAIN, router_bias=True)))
    batches = [torch.randn(5, HIDDEN) for _ in range(2)]
    with torch.no_grad():
        layer.router.bias.zero_()
        layer.router.weight.zero_()
        for rank, batch in enumerate(batches):
            batch[:, 0] = 100.0 * (1 - 2 * rank)
        layer.router.weight[[1, 2], 0] = 1.0
        layer.router.weight[[4, 5], 0] = -1.0
    assert [set(layer.router(batch)[2].flatten().tolist()) for batch in batches] == [{1, 2}, {4, 5}]
    torch.save({"spec": layer.spec, "state": layer.state_dict(), "batches": batches}, tmp_path / "task.pt")

    def in_one_process() -> dict[str, torch.Tensor]:
        layer.zero_grad()
        sum(layer(batch).square().sum() for batch in batches).div(2).backward()
        return {name: p.grad for name, p in layer.named_parameters()}

    for found in run_ranks(RANK, tmp_path, wrapper):
        assert not beyond_bound(found, in_one_process)
        for e in (0, 3, 6, 7):
            assert not found["experts.down_proj"][e].any()
            assert not found["experts.gate_up_proj"][e].any()
