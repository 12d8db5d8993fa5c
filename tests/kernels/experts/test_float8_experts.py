"""Experts in float8: the plain twin against the formula on quantised operands, and the kernels against it."""

import pytest
import torch
import torch.nn.functional as F
from moe_problem import operands, run

from liger_models.kernels import moe_experts, quantize
from liger_models.kernels.experts._expert_float8 import float8_rows_product, stack_by_columns, stack_by_rows
from liger_models.kernels.experts._expert_order import sort_by_expert
from liger_models.kernels.experts.moe_experts import moe_experts_plain

SIZES = {"tokens": 40, "hidden": 32, "inner": 48, "num_experts": 4, "top_k": 2}


def by_rows(x):
    return quantize(x.flatten(0, -2))[0].dequantized().view(x.shape).double()


def formula(x, weights, experts, gate_up, down, dy):
    """Result and gradients, each product in float64 of operands in e4m3, and rounded to bfloat16."""

    def rounded(t):
        return t.float().bfloat16()

    experts, weight = experts.long(), weights.double()[..., None]
    of_gate_up, of_down = gate_up.transpose(1, 2), down.transpose(1, 2)  # by columns
    h = rounded(torch.einsum("th,tkoh->tko", by_rows(x), by_rows(gate_up)[experts]))
    gate, up = h.double().chunk(2, -1)
    a = rounded(F.silu(gate) * up)
    rows = rounded(torch.einsum("tki,tkhi->tkh", by_rows(a), by_rows(down)[experts]))
    y = (weight * rows.double()).sum(1)
    da = rounded(torch.einsum("th,tkih->tki", by_rows(dy), by_rows(of_down)[experts])).double()
    sigmoid = gate.sigmoid()
    dgate = da * up * sigmoid * (1 + gate * (1 - sigmoid))
    dh = rounded(weight * torch.cat([dgate, da * F.silu(gate)], -1))
    dx = torch.einsum("tko,tkho->tkh", by_rows(dh), by_rows(of_gate_up)[experts]).sum(1)
    chosen = F.one_hot(experts, len(gate_up)).double()  # [T, k, E]
    dgate_up = torch.einsum("tke,tko,th->eoh", chosen, dh.double(), x.double())
    ddown = torch.einsum("tke,tkh,tki->ehi", chosen, weight * dy.double()[:, None], a.double())
    return y, dx, (da * a.double()).sum(-1), dgate_up, ddown


def test_products_are_those_of_quantised_operands_and_weight_gradients_those_of_exact_ones():
    torch.manual_seed(0)
    inputs = operands(**SIZES, dtype=torch.bfloat16)
    dy = torch.randn(SIZES["tokens"], SIZES["hidden"]).bfloat16()
    found = run(moe_experts, inputs, dy, float8=True)
    exact = run(moe_experts, inputs, dy)
    with torch.no_grad():
        expected = formula(*inputs, dy)
    for ours, theirs, unquantised in zip(found, expected, exact, strict=True):
        # An intermediate result rounded to bfloat16 in another way, by 2^-9, makes one of 32 of its e4m3
        # numbers another one, 2^-4 away: 1.1% of all. e4m3 rounds by 2.7%, both operands of each product.
        assert (ours.double() - theirs).norm() < 2**-6 * theirs.norm()
        assert (ours - unquantised).norm() > 2**-5 * unquantised.norm()


def of_few_bits(*shape):
    """Numbers that e4m3 holds under any scale: the interpreter does not round to it as hardware does."""
    return torch.randint(-3, 4, shape).bfloat16()


@pytest.mark.parametrize("gather", [False, True])
def test_the_product_and_the_copies_by_columns_are_exact_for_numbers_of_few_bits(interpreted, gather):
    torch.manual_seed(0)
    experts = torch.rand(40, 4).topk(2).indices.int()
    order = sort_by_expert(experts, 4)
    token = (order.order // 2).long()
    expert = experts.flatten()[order.order.long()].long()
    a, b = of_few_bits(40 if gather else 80, 144), of_few_bits(4, 144, 48)
    a *= torch.randint(0, 3, (len(a), 1)).exp2()
    b *= torch.randint(0, 3, (4, 1, 48)).exp2() * 2.0 ** torch.arange(4)[:, None, None]
    source = a[token] if gather else a
    exact = torch.einsum("rk,rkn->rn", source.double(), b.double()[expert])
    for stack, transposed in ((b, False), (b.transpose(1, 2).contiguous(), True)):
        found = float8_rows_product(a, stack, order, transposed=transposed, gather=gather)
        assert torch.equal(found, exact.bfloat16())


def test_columns_have_the_scales_of_their_largest_numbers(interpreted):
    stack = of_few_bits(3, 80, 48) * torch.randint(1, 5, (3, 1, 48)).exp2()
    found, transposed = stack_by_columns(stack), stack_by_rows(stack.transpose(1, 2).contiguous())
    assert torch.equal(found.scales, transposed.scales)
    assert torch.equal(found.values.float(), transposed.values.float())


def test_what_float8_cannot_compute_is_refused():
    x, weights, experts, gate_up, down = operands(7, 24, 48, 4, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 16"):
        moe_experts(x, weights, experts, gate_up, down, float8=True)
    with pytest.raises(TypeError, match="bfloat16"):
        moe_experts(*operands(**SIZES), float8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sizes", [(4096, 2048, 768, 16, 4), (3001, 1024, 3584, 8, 2), (5, 256, 128, 8, 2)])
def test_on_a_gpu_it_is_the_plain_twin(sizes, frozen):
    torch.manual_seed(0)
    inputs = operands(*sizes, None, torch.bfloat16, "cuda")
    if frozen:
        inputs = [*inputs[:3], *(matrices.detach() for matrices in inputs[3:])]
    dy = torch.randn(sizes[0], sizes[1], device="cuda").bfloat16()

    def gradients(function, **options):
        own = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        y = function(*own, **options)
        return [y.detach(), *torch.autograd.grad(y, [t for t in own if t.requires_grad], dy)]

    ours, again = gradients(moe_experts, float8=True), gradients(moe_experts, float8=True)
    twin, exact = gradients(moe_experts_plain, float8=True), gradients(moe_experts)
    for mine, same, theirs, unquantised in zip(ours, again, twin, exact, strict=True):
        assert torch.equal(mine, same)
        # Sums of float8 units have 13 bits, and bfloat16 8: together 2^-8, which makes one of 16 numbers of
        # e4m3 another one, 2^-3.5 away on average: 2.2% of all.
        assert (mine - theirs).norm() < 2**-5 * theirs.norm()
        assert (mine - unquantised).norm() > 2**-5 * unquantised.norm()
