"""Differential attention against its formula, head by head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from liger_models.layers.attention.differential import DifferentialAttention
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import DifferentialAttentionSpec, RopeSpec

HIDDEN, HEADS, KV_HEADS, DIM = 20, 8, 4, 6
SPEC = DifferentialAttentionSpec(HEADS, KV_HEADS, DIM, 0.4, RopeSpec(DIM), 0.3, 1e-3, bias=True)
PACKED = torch.tensor([0, 5, 6, 13])


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = DifferentialAttention(HIDDEN, SPEC).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 0.4)
    return layer


def sequences_of(shape, **options):
    sequences = Sequences.from_call(shape, torch.device("cpu"), **options)
    sequences.prepare_rotary(SPEC.ropes)
    return sequences


def by_hand(layer, x, positions):
    """One document, head by head: the paper's formula, with the reference's order of heads."""
    q, k, v = layer.qkv_proj(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, DIM)) for part in (q, k, v))
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)

    def turned(head):
        a, b = head.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def weights(head):
        scores = turned(q[:, head]) @ turned(k[:, head // (HEADS // KV_HEADS)]).T * SPEC.scale
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)

    factor = (layer.lambda_q1 @ layer.lambda_k1).exp() - (layer.lambda_q2 @ layer.lambda_k2).exp() + 0.3
    outputs = []
    for head in range(HEADS // 2):
        pair = head // (HEADS // KV_HEADS)
        values = torch.cat([v[:, pair], v[:, pair + KV_HEADS // 2]], dim=-1)
        y = (weights(head) - factor * weights(head + HEADS // 2)) @ values
        outputs.append((1 - 0.3) * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3))
    return layer.o_proj(torch.cat(outputs, dim=-1))


def test_packed_documents_equal_the_formula_in_values_and_gradients(layer):
    x = torch.randn(13, HIDDEN, dtype=torch.float64)
    found = layer(x, sequences_of((1, 13), cu_seqlens=PACKED))
    lengths = PACKED.diff().tolist()
    expected = torch.cat([by_hand(layer, part, torch.arange(len(part))) for part in x.split(lengths)])
    # The tables of cosines and sines are in float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, list(layer.parameters()), cotangent) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_cache_gives_what_a_full_pass_gives(layer):
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    expected = layer(x, sequences_of((1, 7)))
    cache, found = KVCache([layer.new_cache(1, 7, x.device, x.dtype)], 1, x.device), []
    for start, end in ((0, 5), (5, 6), (6, 7)):
        positions = cache.reserve(torch.tensor([end - start]), end - start)
        step = sequences_of((1, end - start), position_ids=positions)
        step.cache = cache
        found.append(layer(x[start:end], step))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [{"num_key_value_heads": 1}, {"num_attention_heads": 3}])
def test_heads_that_form_no_pairs_are_refused(heads):
    with pytest.raises(ValueError, match="expected even numbers"):
        DifferentialAttention(HIDDEN, replace(SPEC, **heads))
