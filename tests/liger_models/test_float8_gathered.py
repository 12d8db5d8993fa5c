"""Weights gathered in float8 under FSDP2 on two processes: gradients match the quantised weights in one
process, and sharded weights do not change.
"""

from pathlib import Path

import pytest
import torch
from float8_rank import make_model
from ranks import run_ranks
from test_float8 import CONFIG
from torch import nn

from liger_models.kernels import quantize
from liger_models.layers.projections.float8 import Float8Settings
from liger_models.layers.projections.gathered import GatheredWeight
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.low_rank import low_rank_linear, projection_of
from liger_models.layers.projections.low_rank_plan import Adapter

RANK = Path(__file__).parent / "float8_gather_rank.py"


def gathered_weight(weight: torch.Tensor, one_scale: bool) -> nn.Parameter:
    return nn.Parameter(GatheredWeight(quantize(weight, one_scale=one_scale)[0], weight.dtype))


@pytest.mark.parametrize(
    ("recipe", "level", "stored"),
    [("rowwise", "lean", "bfloat16"), ("tensorwise", "checkpoint", "float32")],
)
def test_two_steps_are_those_of_quantised_weights_and_are_resumed_to_the_bit(recipe, level, stored, tmp_path):
    ids = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(1))
    torch.save({"config": CONFIG, "ids": ids}, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path, recipe, level, stored)
    model = make_model(CONFIG, recipe, level, getattr(torch, stored)).bfloat16()
    for path in found[0]["paths"]:
        layer = model.get_submodule(path)
        layer.weight = gathered_weight(layer.weight.detach(), recipe == "tensorwise")
    assert len(found[0]["paths"]) == 4 * CONFIG["num_hidden_layers"]
    halves = []
    for rank, own in zip(found, ids.chunk(2), strict=True):
        model.zero_grad()
        loss = model(own, labels=own).loss
        loss.backward()
        assert torch.equal(rank["steps"][0]["loss"], loss)
        halves.append({name: p.grad.float() for name, p in model.named_parameters()})
        assert rank["gathered"]
        assert set(rank["gathered"]) == {("GatheredWeight", torch.bfloat16)}
        assert rank["local"] == {(torch.Tensor, getattr(torch, stored))}
        assert not torch.equal(rank["steps"][0]["loss"], rank["steps"][1]["loss"])
        assert torch.equal(rank["resumed"]["loss"], rank["steps"][1]["loss"])
        for name, gradient in rank["resumed"]["gradients"].items():
            assert torch.equal(gradient, rank["steps"][1]["gradients"][name])
        assert len(rank["refused"]) == 2
    for name, gradient in found[0]["steps"][0]["gradients"].items():
        mean = (halves[0][name] + halves[1][name]) / 2
        torch.testing.assert_close(gradient.float(), mean, rtol=2**-8, atol=2**-8 * float(mean.abs().max()))
        assert torch.equal(gradient, found[1]["steps"][0]["gradients"][name])


@pytest.mark.parametrize("one_scale", [False, True])
def test_columns_of_a_gathered_weight_are_its_own(one_scale):
    torch.manual_seed(0)
    weight = torch.randn(48, 32).bfloat16()
    gathered = GatheredWeight(quantize(weight, one_scale=one_scale)[0], weight.dtype)
    exact = quantize(weight, by_rows=False, by_columns=True, one_scale=one_scale)[1].dequantized()
    columns = gathered.columns().dequantized()
    if one_scale:
        assert torch.equal(columns, exact)
    # Rounded to 4 bits by its row's scale, and again, if subnormal, by its column's.
    smallest = gathered.columns().scales * 2.0**-10 + gathered.rows.scales.T * 2.0**-10
    assert ((columns - weight.T.float()).abs() <= weight.T.float().abs() * 2.0**-4 + smallest).all()


def test_adapters_and_gathered_layers_run_as_one_operation():
    torch.manual_seed(0)
    x, dy = torch.randn(21, 32).bfloat16().requires_grad_(), torch.randn(21, 96).bfloat16()
    results = []
    for gathered in (False, True):
        torch.manual_seed(1)
        layers = [Linear(32, 48, bias=False).bfloat16().requires_grad_(False) for _ in range(2)]
        adapter = Adapter(torch.randn(4, 32), torch.randn(48, 4), 0.5)
        for layer in layers:
            layer.float8 = Float8Settings("rowwise", emulate=True)
            if gathered:
                layer.weight = gathered_weight(layer.weight, False)
        projections = [projection_of(layer)._replace(adapters=(adapter,)) for layer in layers]
        y = low_rank_linear(x, *projections)
        results.append((y.detach(), torch.autograd.grad(y, x, dy)[0]))
    (y, dx), (of_gathered, dx_of_gathered) = results
    assert torch.equal(of_gathered, y)
    # Numbers that become subnormal under the scale of their column are rounded twice.
    torch.testing.assert_close(dx_of_gathered, dx, rtol=2**-6, atol=2**-5)


def test_only_float8_products_read_a_gathered_weight():
    weight = gathered_weight(torch.randn(48, 32).bfloat16(), False)
    with pytest.raises(RuntimeError, match="gathered in float8"):
        torch.nn.functional.linear(torch.randn(3, 32).bfloat16(), weight)
