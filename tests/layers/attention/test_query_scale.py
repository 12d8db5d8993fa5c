"""Queries that grow with their positions."""

import math

import torch

from liger_models.layers.attention import query_scale
from liger_models.layers.attention.query_scale import LearnedQueryScale, scale_queries
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec, QueryScaleSpec


def test_the_factor_grows_by_the_logarithm_of_lengths_passed():
    sequences = Sequences.from_call((1, 7), torch.device("cpu"), position_ids=torch.arange(5, 12)[None])
    found = sequences.positions.query_scale(QueryScaleSpec(beta=0.3, length=4))
    lengths_passed = [1, 1, 1, 2, 2, 2, 2]  # for positions 5 to 11
    assert found.tolist() == torch.tensor([1 + 0.3 * math.log(1 + n) for n in lengths_passed]).tolist()
    assert sequences.positions.query_scale(QueryScaleSpec(beta=0.3, length=4)) is found  # computed once


def test_positions_count_from_each_documents_start():
    bounds = torch.tensor([0, 3, 9])
    sequences = Sequences.from_call((1, 9), torch.device("cpu"), cu_seqlens=bounds)
    found = sequences.positions.query_scale(QueryScaleSpec(beta=1.0, length=2))
    expected = [math.log(1 + n // 2) + 1 for n in [0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert torch.allclose(found, torch.tensor(expected))


def test_the_first_position_may_count_as_another():
    sequences = Sequences.from_call((1, 5), torch.device("cpu"))
    found = sequences.positions.query_scale(QueryScaleSpec(beta=1.0, length=2, first=1))
    assert torch.allclose(found, torch.tensor([math.log(1 + (n + 1) // 2) + 1 for n in range(5)]))


def test_the_factor_may_be_a_power_of_lengths_passed():
    """Beam's constants, at far positions: (1 + (position + 1) / 2048) ^ 0.1."""
    positions = torch.tensor([[0, 2047, 500_000]])
    sequences = Sequences.from_call((1, 3), torch.device("cpu"), position_ids=positions)
    found = sequences.positions.query_scale(QueryScaleSpec(0.1, 2048, first=1, power=True))
    expected = [(1 + (n + 1) / 2048) ** 0.1 for n in positions[0].tolist()]
    # A logarithm, its product and an exponential of float32.
    torch.testing.assert_close(found, torch.tensor(expected), rtol=4 * 2**-23, atol=0)


def test_a_product_and_its_gradient_are_rounded_once():
    spec, sequences = QueryScaleSpec(0.3, 2), Sequences.from_call((1, 9), torch.device("cpu"))
    torch.manual_seed(0)
    rows = torch.randn(9, 24, dtype=torch.bfloat16, requires_grad=True)
    q, dy = rows[:, 4:20].unflatten(1, (2, 8)), torch.randn(9, 2, 8, dtype=torch.bfloat16)
    found = scale_queries(q, spec, sequences)
    factors = sequences.positions.query_scale(spec)[:, None, None]
    assert torch.equal(found, (q.float() * factors).bfloat16())
    found.backward(dy)
    assert torch.equal(rows.grad[:, 4:20], (dy.float() * factors).bfloat16().flatten(1))
    assert scale_queries(q, None, sequences) is q


def test_scores_and_nothing_else_are_multiplied():
    """As if the token were asked with a sharper softmax: values and the dtype of the layer stay."""
    spec = AttentionSpec(2, 1, 8, 8**-0.5)
    torch.manual_seed(0)
    plain = Attention(16, spec).double()
    scaled = Attention(16, AttentionSpec(2, 1, 8, 8**-0.5, query_scale=QueryScaleSpec(0.5, 1))).double()
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(3, 16, dtype=torch.float64)
    sequences = Sequences.from_call((1, 3), torch.device("cpu"))
    found = scaled(x, sequences)
    with torch.no_grad():  # only position 2: its query is multiplied by the factor
        factor = 1 + 0.5 * torch.log(torch.tensor(3.0)).double()
        plain.qkv_proj.weight[:16] *= factor
    torch.testing.assert_close(found[2], plain(x, sequences)[2], rtol=1e-6, atol=0)
    assert found.dtype == torch.float64


def test_learned_factors_and_all_gradients_are_those_of_the_formula(monkeypatch):
    monkeypatch.setattr(query_scale, "_TOKENS", 4)  # in several pieces
    torch.manual_seed(0)
    scaled = LearnedQueryScale(3).double()
    for parameter in scaled.parameters():
        torch.nn.init.normal_(parameter)
    sequences = Sequences.from_call((1, 9), torch.device("cpu"), cu_seqlens=torch.tensor([0, 4, 9]))
    q = torch.randn(9, 3, 8, dtype=torch.float64, requires_grad=True)
    inputs, dy = (q, scaled.scale, scaled.bias), torch.randn(9, 3, 8, dtype=torch.float64)
    logarithms = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 5]).float().log().double()
    expected = q * (logarithms[:, None] * scaled.scale + scaled.bias)[..., None]
    found = scaled(q, sequences)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(y, inputs, dy) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_learned_factors_round_a_product_once():
    torch.manual_seed(0)
    scaled = LearnedQueryScale(2).bfloat16()
    for parameter in scaled.parameters():
        torch.nn.init.normal_(parameter)
    q, sequences = torch.randn(9, 2, 8).bfloat16(), Sequences.from_call((1, 9), torch.device("cpu"))
    factors = torch.arange(1, 10).float().log()[:, None] * scaled.scale.float() + scaled.bias.float()
    assert torch.equal(scaled(q, sequences), (q.float() * factors[..., None]).bfloat16())


def test_factors_that_start_late_follow_the_formula():
    sequences = Sequences.from_call((1, 9), torch.device("cpu"))
    found = sequences.positions.query_scale(QueryScaleSpec(beta=0.3, length=4, first=1, late=True))
    expected = [1.0] * 4 + [1 + 0.3 * math.log(n / 4) for n in range(5, 10)]
    torch.testing.assert_close(found, torch.tensor(expected))
