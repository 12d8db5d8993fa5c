"""Operations on more than 2^31 elements: the last rows, which 32-bit offsets do not reach, are as they are
alone. Operations on independent rows are in test_contract_on_a_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

import liger_models.kernels as kernels
from liger_models.kernels.streams.streams import mixed_streams, weighted_streams

pytestmark = pytest.mark.gpu

GIB = 2**30
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def room():
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if free < 100 * GIB:
        pytest.skip(f"needs a GPU with 100 GiB to spare; there are {free / GIB:.0f}")
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def draw(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_()


def run(operation, operands, douts=None):
    """Outputs, gradients of operands, and the gradients of outputs."""
    outputs = operation(*operands)
    outputs = [x for x in ((outputs,) if isinstance(outputs, torch.Tensor) else outputs) if x.requires_grad]
    douts = [torch.randn_like(x) for x in outputs] if douts is None else douts
    gradients = torch.autograd.grad(outputs, operands, douts)
    return [x.detach() for x in outputs], gradients, douts


def assert_last_rows_are_as_alone(operation, operands, rows, alone, last):
    """`operation` on operands of which some have `rows` rows, and `alone` on the last of them."""
    outputs, gradients, douts = run(operation, operands)
    few = [x.detach()[-last:].clone().requires_grad_() if len(x) == rows else x for x in operands]
    found, some, _ = run(alone, few, [x[-last:] if len(x) == rows else x for x in douts])
    compared = 0
    for many, one in zip((*outputs, *gradients), (*found, *some), strict=True):
        if len(many) == rows:
            error = (many[-last:].double() - one.double()).norm() / one.double().norm()
            # The same operations; their tiles may differ with the number of rows: a few roundings.
            assert error <= 2.0**-7, error
            compared += 1
    assert compared > 1


def documents(rows, last):
    return torch.tensor([0, rows - last, rows], device="cuda", dtype=torch.int32)


def rule_of(name, tokens, last):
    """A recurrent rule's operands, and the rule on all documents and on the last one."""
    if name == "gated_delta_rule":
        heads = [draw(tokens, 16, 128), draw(tokens, 16, 128), draw(tokens, 32, 128)]
        operands = [*heads, draw(tokens, 32), draw(tokens, 32), draw(32), draw(32)]
    elif name == "channel_delta_rule":
        operands = [*(draw(tokens, 32, 128) for _ in range(4)), draw(tokens, 32), draw(32), draw(32, 128)]
    else:
        operands = [draw(tokens, 128, 64), draw(tokens, 128), *(draw(tokens, 1, 128) for _ in range(2))]
        operands += [draw(128) for _ in range(3)]
    rule = getattr(kernels, name)
    return (
        operands,
        lambda *x: rule(*x, cu_seqlens=documents(tokens, last))[0],
        lambda *x: rule(*x)[0],
    )


@pytest.mark.parametrize(
    ("name", "tokens"), [("gated_delta_rule", 530_000), ("channel_delta_rule", 530_000), ("ssd", 265_000)]
)
def test_recurrent_rules(name, tokens):
    operands, many, alone = rule_of(name, tokens, 512)
    assert max(x.numel() for x in operands) > 2**31
    assert_last_rows_are_as_alone(many, operands, tokens, alone, 512)


def test_rows_of_experts():
    tokens, hidden, inner, experts, top_k = 131_072, 2048, 2304, 8, 4
    assert tokens * top_k * 2 * inner > 2**31
    gate_up, down = draw(experts, 2 * inner, hidden, scale=0.02), draw(experts, hidden, inner, scale=0.02)
    router = torch.rand(tokens, experts, device="cuda").topk(top_k)
    chosen, weights = router.indices.int(), router.values.to(BF16).requires_grad_()

    def run_all(x, weights):
        return kernels.moe_experts(x, weights, chosen[-len(x) :], gate_up, down)

    assert_last_rows_are_as_alone(run_all, [draw(tokens, hidden), weights], tokens, run_all, 256)


def test_stacks_of_experts():
    tokens, hidden, inner, experts = 4096, 4096, 4096, 66
    assert experts * 2 * inner * hidden > 2**31
    gate_up, down = draw(experts, 2 * inner, hidden, scale=0.02), draw(experts, hidden, inner, scale=0.02)
    x, weights = draw(tokens, hidden), torch.rand(tokens, 2, device="cuda", dtype=BF16).requires_grad_()
    chosen = torch.tensor([0, experts - 1], device="cuda", dtype=torch.int32).expand(tokens, 2).contiguous()
    y, gradients, _ = run(
        lambda *operands: kernels.moe_experts(operands[0], weights, chosen, *operands[1:]),
        [x, gate_up, down],
        dout := [torch.randn(tokens, hidden, device="cuda", dtype=BF16)],
    )
    pair = [stack.detach()[[0, -1]].clone().requires_grad_() for stack in (gate_up, down)]
    few = chosen.clamp(max=1)
    z, some, _ = run(
        lambda *operands: kernels.moe_experts(operands[0], weights, few, *operands[1:]), [x, *pair], dout
    )
    found = (*y, gradients[0], gradients[1][[0, -1]], gradients[2][[0, -1]])
    for many, one in zip(found, (*z, *some), strict=True):
        assert (many.double() - one.double()).norm() <= 2.0**-7 * one.double().norm()
    assert not gradients[1][1:-1].any()


def test_routing():
    tokens, experts = 17_000_000, 128
    assert tokens * experts > 2**31
    logits = draw(tokens, experts)

    def weights(x):
        return kernels.route(x, 8)[0]

    assert_last_rows_are_as_alone(weights, [logits], tokens, weights, 512)


def test_streams():
    tokens, width, count = 135_000, 4096, 4
    assert tokens * width * count > 2**31
    shapes = (count * (count + 2), count * width), (count * (count + 2),), (3,)
    parameters = [draw(*shape, scale=0.02) for shape in shapes]

    def connect(x, *parameters):
        options = {"count": count, "iterations": 3, "eps": 1e-6, "norm_eps": 1e-6}
        return mixed_streams(x, *weighted_streams(x, *parameters, **options))

    assert_last_rows_are_as_alone(connect, [draw(tokens, count * width), *parameters], tokens, connect, 256)


def test_embeddings():
    rows, width = 270_000, 8192
    assert rows * width > 2**31
    weight = draw(rows, width)
    ids = torch.tensor([0, rows - 1, 5, rows - 1, rows - 2], device="cuda")
    y = kernels.embedding(ids, weight)
    assert torch.equal(y, weight.detach()[ids])
    dout = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, weight, dout)
    torch.testing.assert_close(found[-1], (dout[1].float() + dout[3].float()).to(BF16), rtol=2**-8, atol=0)
    assert torch.equal(found[-2], dout[4])
    assert torch.equal(found[0], dout[0])
    assert not found[6:-2].any()


def test_quantised_matrices():
    matrices, rows, columns = 66, 8192, 4096
    assert matrices * rows * columns > 2**31
    codes = torch.randint(0, 120, (matrices, rows, columns), dtype=torch.uint8, device="cuda")
    scale = torch.rand(matrices, rows // 128, columns // 128, device="cuda")
    found = kernels.decode_codes(codes, scale, (rows, columns), (128, 128), "float8", BF16)
    last = kernels.decode_codes(
        codes[-1:].contiguous(), scale[-1:].contiguous(), (rows, columns), (128, 128), "float8", BF16
    )
    assert torch.equal(found.view(matrices, rows, columns)[-1:], last.view(1, rows, columns))


def test_operands_rounded_to_8_bits_and_to_three_values():
    rows, columns, last = 540_032, 4096, 256
    assert rows * columns > 2**31
    x = draw(rows, columns).detach()
    assert torch.equal(kernels.round_inputs(x)[-last:], kernels.round_inputs(x[-last:].clone()))
    scale = kernels.weight_scales(x[-last:], (last,))
    found = kernels.round_weights(x, (rows,), scales=scale)
    assert torch.equal(found[-last:], kernels.round_weights(x[-last:].clone(), (last,), scales=scale))


def test_copies_in_float8():
    rows, columns, last = 540_032, 4096, 256
    assert rows * columns > 2**31
    x = draw(rows, columns).detach()
    by_rows, by_columns = kernels.quantize(x, by_columns=True)
    few, _ = kernels.quantize(x[-last:].contiguous())
    assert torch.equal(by_rows.values[-last:].view(torch.uint8), few.values.view(torch.uint8))
    assert torch.equal(by_rows.scales[-last:], few.scales)
    # By columns, rows follow each other: [columns, rows], each column with one scale.
    turned = by_columns.values[:, rows - last : rows].float() * by_columns.scales.view(-1, 1)
    exact = x[-last:].float().t()
    largest = x.abs().amax(0).float()[:, None]
    assert ((turned - exact).abs() <= exact.abs() * 2**-4 + largest * 2**-9).all()


def test_sums_of_squares():
    count = 2**31 + 4099
    x = torch.ones(count, device="cuda", dtype=BF16)
    x[-4099:] = 3
    found = kernels.sum_of_squares([x])
    expected = 2**31 + 9 * 4099
    assert abs(found.double().sum().item() - expected) <= expected * 2**-22
