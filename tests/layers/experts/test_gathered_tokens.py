"""The exchange of all tokens between ranks that share experts, in a group of one rank and without any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from liger_models.layers.experts.expert_parallel import ExpertExchange
from liger_models.layers.experts.gathered_tokens import GatheredRoutes, TokenCounts, TokenExchange

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("rank", range(3))
def test_experts_are_numbered_from_the_first_of_their_rank(rank):
    group = SimpleNamespace(size=lambda: 3, rank=lambda: rank)
    exchange = ExpertExchange(group, 4, None, TokenCounts(group))
    experts = torch.arange(12, dtype=torch.int32).view(6, 2)
    own = exchange.local(experts)
    assert own.dtype == torch.int32
    assert own[2 * rank : 2 * rank + 2].flatten().tolist() == [0, 1, 2, 3]
    assert (own == -1).sum() == 8


def test_rows_that_were_taken_are_not_copied_to_their_place(group):
    exchange, x = TokenExchange(group, [3]), torch.randn(3, 5)
    rows = exchange.gather(x)
    rows.fill_(7.0)
    assert exchange.own_rows() is x
    exchange.arrive()
    assert (rows == 7.0).all()
    rows = exchange.gather(x)
    exchange.arrive()
    assert torch.equal(rows, x)


def test_results_that_a_hook_replaced_after_they_were_sent_are_an_error(group):
    exchange, rows = TokenExchange(group, [3]), torch.randn(3, 5)
    for ask in (lambda: None, exchange.parts):
        exchange.leave(rows)
        ask()
        with pytest.raises(RuntimeError, match="a hook has replaced results of experts"):
            exchange.returned(rows.clone())
    assert torch.equal(exchange.returned(rows), rows)


@pytest.mark.parametrize(("of_x", "of_weights"), [(True, True), (True, False), (False, True)])
def test_only_what_needs_a_gradient_gets_one(group, of_x, of_weights):
    x, weights = torch.randn(3, 5, requires_grad=of_x), torch.rand(3, 2, requires_grad=of_weights)
    routes = GatheredRoutes(ExpertExchange(group, 4, None, TokenCounts(group)), [3])
    experts = torch.tensor([[0, 3], [1, 2], [3, 1]], dtype=torch.int32)
    all_x, all_weights, own = routes.there(x, weights, experts, counted=False)
    assert (all_x.requires_grad, all_weights.requires_grad) == (of_x, of_weights)
    assert torch.equal(own, experts)
    total = sum(2 * t.sum() for t in (all_x, all_weights) if t.requires_grad)
    total.backward()
    for t in (x, weights):
        assert t.grad is None if not t.requires_grad else (t.grad == 2).all()
