"""Linear layers of three values: the bits of transformers' `AutoBitLinear`, forward and backward, and no more
memory than plain layers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from torch import nn
from transformers.integrations.bitnet import AutoBitLinear

from liger_models.kernels import round_inputs
from liger_models.layers.parts.mlp import make_mlp
from liger_models.layers.projections.linear import Linear, is_plain, round_operands
from liger_models.layers.projections.low_rank import projection_of
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.projections.ternary import plain_ternary_linear
from liger_models.layers.recompute import tiles
from liger_models.layers.specs import MLPSpec, NormSpec, TernarySpec

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles the rounding functions, for which the compiled form may have other bits."""
    with torch.compiler.set_stance("force_eager"):
        yield


def reference(inputs, outputs, bias=False, dtype=torch.float32):
    layer = AutoBitLinear(inputs, outputs, bias=bias, online_quant=True).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.1, 0.5)
    return layer


def like(layer, kind=Linear):
    ours = kind(layer.in_features, layer.out_features, layer.bias is not None).to(layer.weight.dtype)
    ours.load_state_dict(layer.state_dict())
    ours.ternary = TernarySpec()
    return ours


def gradients(layer, x, dy):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_have_the_references_bits(dtype, bias):
    layer = reference(24, 20, bias, dtype)
    x, dy = torch.randn(9, 24, dtype=dtype), torch.randn(9, 20, dtype=dtype)
    for found, expected in zip(gradients(like(layer), x, dy), gradients(layer, x, dy), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_packed_projections_have_scales_of_their_own():
    parts = [reference(24, 20), reference(24, 12)]
    parts[1].weight.data.mul_(7)
    packed = PackedLinear(24, {"gate_proj": 20, "up_proj": 12})
    packed.weight.data.copy_(torch.cat([part.weight for part in parts]))
    packed.ternary = TernarySpec()
    x, dy = torch.randn(9, 24), torch.randn(9, 32)
    separate = [gradients(part, x, own) for part, own in zip(parts, dy.split([20, 12], 1), strict=True)]
    y, _, dw = gradients(packed, x, dy)
    # Other shapes may be summed in another order.
    torch.testing.assert_close(y, torch.cat([found[0] for found in separate], 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, torch.cat([found[2] for found in separate]), rtol=1e-5, atol=1e-5)


def test_autocast_rounds_as_the_reference():
    layer = reference(24, 20, bias=True)
    x, dy = torch.randn(9, 24), torch.randn(9, 20, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        found = gradients(like(layer), x, dy)
    assert torch.equal(found[0], expected)
    assert [part.dtype for part in found] == [torch.bfloat16] + [torch.float32] * 3
    with torch.autocast("cpu", torch.bfloat16):
        for ours, theirs in zip(found, gradients(layer, x, dy), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rounds", [True, False])
def test_the_plain_twin_agrees(rounds):
    layer, spec = like(reference(24, 20, bias=True)), TernarySpec(rounds)
    layer.ternary = spec
    x, dy = torch.randn(9, 24, requires_grad=True), torch.randn(9, 20)
    found = gradients(layer, x, dy)
    layer.zero_grad()
    y = plain_ternary_linear(x, layer.weight, layer.bias, spec, (20,))
    y.backward(dy)
    for ours, twin in zip(found, [y, x.grad, layer.weight.grad, layer.bias.grad], strict=True):
        assert torch.equal(ours, twin)


def test_weights_of_three_values_are_not_rounded_again():
    layer = like(reference(24, 20))
    layer.ternary = TernarySpec(rounds_weights=False)
    x = torch.randn(9, 24)
    assert torch.equal(layer(x), F.linear(round_inputs(x), layer.weight))


def test_only_the_operands_are_kept_for_the_backward_pass():
    layer, x = like(reference(64, 96)), torch.randn(80, 64, requires_grad=True)
    with LiveBytes([x, *layer.parameters()]) as live:
        y = layer(x)
        assert live.now == y.nbytes + 4  # the scale of the weight
        y.sum().backward()


def test_a_frozen_weight_keeps_no_input():
    layer = like(reference(64, 96)).requires_grad_(False)
    x = torch.randn(80, 64, requires_grad=True)
    with LiveBytes([*layer.parameters()]) as live:
        y = layer(x * 2)
        assert live.now == y.nbytes + 4  # the scale of the weight
        y.sum().backward()
    assert x.grad is not None


def test_nothing_takes_the_layer_for_a_plain_one():
    layer = like(reference(8, 8))
    assert not is_plain(layer)
    assert projection_of(layer) is None


def test_an_mlp_in_tiles_has_the_gradients_of_one_at_once(monkeypatch):
    mlp = make_mlp(24, MLPSpec(40, "relu2", down_norm=NormSpec(0.01)))
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, 0.1, 0.5)
    round_operands(mlp.double(), TernarySpec())
    # In float64 other sums do not move the input of down, which is rounded in float32, across a tie.
    x, dy = torch.randn(12, 24).double(), torch.randn(12, 24).double()
    whole = gradients(mlp, x, dy)
    mlp.zero_grad()
    mlp.activation_memory = "tiled"
    monkeypatch.setattr(tiles, "TILE", 5)
    monkeypatch.setattr(tiles, "recompute", None)  # it runs in tiles, and not whole
    for found, expected in zip(gradients(mlp, x, dy), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
