"""Products that run while ranks exchange rows give the bits of products that begin afterwards."""

import importlib

import pytest
import torch
from moe_problem import CLAMPED, operands

from liger_models.kernels import ExpertPath, moe_experts
from liger_models.kernels._dispatch import interpret, interpreted
from liger_models.kernels.experts import _expert_order
from liger_models.kernels.experts._expert_order import sort_by_expert, split_tiles, windows

products = importlib.import_module("liger_models.kernels.experts.moe_experts")


class Delayed:
    """Substitute for one of three ranks, with the first `own` tokens: rows of other tokens are wrong until
    they arrive, and its own until they are filled in.
    """

    overlaps, ranks = False, 3

    def __init__(self, own: int, num_rows: int, divisor: int):
        self.own, self.left, self.rows, self.divisor = own, [], num_rows, divisor
        self.added = []

    def num_rows(self) -> int:
        return self.rows

    def gather(self, x):
        self.arriving, self.true, self.missing = torch.full_like(x, torch.nan), x, True
        return self.arriving

    def own_rows(self):
        self.missing = False
        return self.true[: self.own].clone()

    def fill(self):
        if self.missing:
            self.arriving[: self.own] = self.true[: self.own]
        self.missing = False

    def arrive(self):
        self.fill()
        self.arriving[self.own :] = self.true[self.own :]

    def leave(self, rows):
        self.left.append(rows[self.own :].clone())

    def parts(self):
        self.added.append(torch.randn(self.ranks - 1, self.own, self.true.shape[1]))
        return self.added[-1]

    def leave_weights(self, dweights):
        self.left_weights = dweights[self.own :].clone()


class Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange):
        rows = exchange.gather(x)
        exchange.fill()
        return rows

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, exchange):
        ctx.exchange = exchange
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.exchange.gather(gradient), None


@pytest.mark.skipif(not interpreted, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("case", "own", "most"),
    [
        *[("plain", 29, 128), ("biases", 40, 128), ("paths", 29, 128), ("frozen", 29, 128)],
        *[("plain", 29, 32), ("biases", 29, 32), ("paths", 29, 32)],
    ],
)
def test_rows_that_arrive_and_leave_while_products_run_have_the_same_bits(case, own, most, monkeypatch):
    """If they fit the first window of rows; those of later windows are added to sums after rounding."""
    monkeypatch.setattr(products, "windows", lambda order, _: windows(order, most))
    # Experts with two tiles of rows, in which those of the first tokens end anywhere.
    monkeypatch.setattr(_expert_order, "_block_rows", lambda *_: 16)
    sizes = {"tokens": 40, "hidden": 20, "inner": 12, "num_experts": 3, "top_k": 2}
    x, weights, experts, *matrices = operands(**sizes, biases=case == "biases")
    experts = torch.where(experts == 2, -1, experts)  # on another rank
    paths = {}
    if case == "paths":
        a, b = torch.randn(3 * 2, 20, requires_grad=True), torch.randn(24, 2 * 3, requires_grad=True)
        paths = {"gate_up_paths": [ExpertPath(a, b, 0.1)]}
    activation = CLAMPED if case == "biases" else "silu"
    for matrix in matrices:
        matrix.requires_grad_(case not in ("frozen", "paths"))
    operand = weights, experts, *matrices[:2], activation, *matrices[2:]
    leaves = [x, weights, *matrices, *(t for path in paths.values() for t in path[0][:2])]
    leaves = [t for t in leaves if t.requires_grad]
    upstream = torch.randn(40, 20)
    num_rows = int((experts >= 0).sum())
    assert num_rows > 32  # so the second window has some
    with interpret():
        alone = moe_experts(x, *operand, num_rows=num_rows, **paths)
        expected = torch.autograd.grad(alone, leaves, upstream)
        exchange = Delayed(own, num_rows, divisor=1 if case == "paths" else 4)
        y = moe_experts(Start.apply(x, exchange), *operand, **paths, exchange=exchange)
        assert exchange.overlaps
        (left,) = exchange.left
        assert_same(y, with_parts(alone, exchange.added[0]), most)
        assert torch.equal(left, y[own:])
        gradients = torch.autograd.grad(End.apply(y, exchange), leaves, upstream)
    assert torch.equal(exchange.left[1], gradients[0][own:])
    assert torch.equal(exchange.left_weights, gradients[1][own:])
    expected = [with_parts(expected[0], exchange.added[1]), *expected[1:]]
    for leaf, gradient, true in zip(leaves, gradients, expected, strict=True):
        divided = any(leaf is matrix for matrix in matrices[:2])
        assert_same(gradient, true / exchange.divisor if divided else true, most)


def with_parts(sums, parts):
    """The sums [T, H] of a rank, and of the other ones for its own tokens, in the order of ranks."""
    sums = sums.detach().clone()
    for part in parts:
        sums[: len(part)] += part
    return sums


def assert_same(found, true, most):
    """Bits; of two windows up to the order of sums, of up to 40 terms, each rounded at the largest size."""
    if most == 128:
        assert torch.equal(found, true)
    else:
        torch.testing.assert_close(found, true, rtol=0, atol=40 * 2**-24 * true.abs().max().item())


@pytest.mark.skipif(not interpreted, reason="needs Triton's interpreter")
def test_tiles_of_the_first_tokens_are_whole_and_the_others_follow():
    experts = torch.randint(-1, 3, (300, 2), generator=torch.Generator().manual_seed(0))
    with interpret():
        order = sort_by_expert(experts.int(), 3, int((experts >= 0).sum()))
        own, rest = split_tiles(order, 170)
    seen = torch.zeros(order.num_rows, dtype=torch.int64)
    for part, first in ((own, True), (rest, False)):
        for tile in range(int(part.num_tiles)):
            expert, row = int(part.tile_expert[tile]), int(part.tile_row[tile])
            rows = slice(row, min(row + order.block, int(order.offsets[expert + 1])))
            seen[rows] += 1
            if first:
                assert (order.order[rows] // 2 < 170).all()
    assert (seen == 1).all()
    assert int(own.num_tiles) == sum((experts[:170] == e).sum() // order.block for e in range(3))
