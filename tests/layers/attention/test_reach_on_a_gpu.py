"""Attention of more elements than torch's kernels address equals that of its parts."""

from __future__ import annotations

import pytest
import torch

from liger_models.layers.attention.backends import attend
from liger_models.layers.attention.fused import masked_attention, unmasked_attention
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec

pytestmark = pytest.mark.gpu

GIB = 2**30


@pytest.fixture(autouse=True)
def room():
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if free < 70 * GIB:
        pytest.skip(f"needs a GPU with 70 GiB to spare; there are {free / GIB:.0f}")
    yield
    torch.compiler.reset()
    torch.cuda.empty_cache()


def draw(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def gradients(run, operands, dout):
    out = run(*operands)
    return [x.detach() for x in (out, *torch.autograd.grad(out, operands, dout))]


def assert_equal(found, expected, tolerance):
    """`tolerance` of the norm: 0 for the same kernel on the same data."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error <= tolerance, f"{name}: {error}"


# Results of two kernels in bfloat16, of about twenty roundings by 2^-9 each: 2^-9 sqrt(20) < 2^-6.
TOLERANCE = 2.0**-6


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "tokens", "dim", "causal"),
    [
        (1, 544, 1, 32_768, 128, True),  # one key head for all
        (9, 64, 8, 32_768, 128, True),
        (2100, 16, 16, 729, 72, False),  # an encoder's: not by cuDNN
        (1100, 16, 16, 1025, 128, False),
    ],
)
def test_the_last_head_of_the_last_row_equals_it_alone(rows, heads, kv_heads, tokens, dim, causal, compiled):
    if compiled and not causal:
        pytest.skip("as uncompiled, by the graph's break")
    torch.manual_seed(0)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, None, causal=causal)
    q, k, v = (draw(rows * tokens, count, dim) for count in (heads, kv_heads, kv_heads))
    assert q.numel() > 2**31 or rows * heads * tokens * 128 > 2**31
    sequences = Sequences.from_call((rows, tokens), torch.device("cuda"))

    def run(q, k, v):
        return attend(q, k, v, spec, sequences, "sdpa", None)

    dout = torch.randn_like(q)
    group = heads // kv_heads
    found = gradients(torch.compile(run) if compiled else run, (q, k, v), dout)
    last = [x.detach()[-tokens:, -group:] for x in (q, dout)], [x.detach()[-tokens:, -1:] for x in (k, v)]
    (q1, dout1), (k1, v1) = last
    alone = [x.clone().unflatten(0, (1, -1)).transpose(1, 2).requires_grad_() for x in (q1, k1, v1)]
    dout1 = dout1.clone().unflatten(0, (1, -1)).transpose(1, 2)

    def one_by_one(q, k, v):  # one query head at a time, within reach; gradients of k and v add up in float32
        of_heads = (x.expand(-1, q.shape[1], -1, -1).split(1, 1) for x in (k, v))
        found = [
            unmasked_attention(*head, spec.scale, causal)
            for head in zip(q.split(1, 1), *of_heads, strict=True)
        ]
        return torch.cat(found, 1)

    expected = gradients(one_by_one, alone, dout1)
    cut = [x[-tokens:, -(group if i < 2 else 1) :] for i, x in enumerate(found)]
    assert_equal([x.unflatten(0, (1, -1)).transpose(1, 2) for x in cut], expected, TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_of_varlen_equal_the_last_one_alone(compiled):
    torch.manual_seed(0)
    heads, kv_heads, dim, documents, length = 64, 8, 128, 33, 8192
    tokens = documents * length
    assert tokens * heads * dim > 2**31
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, 4096)
    q, k, v = (draw(tokens, count, dim) for count in (heads, kv_heads, kv_heads))
    cu = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    many = Sequences.from_call((1, tokens), torch.device("cuda"), cu_seqlens=cu)
    one = Sequences.from_call((1, length), torch.device("cuda"))

    def run(q, k, v):
        return attend(q, k, v, spec, many, "varlen", None)

    dout = torch.randn_like(q)
    found = gradients(torch.compile(run) if compiled else run, (q, k, v), dout)
    last = [x.detach()[-length:].clone().requires_grad_() for x in (q, k, v)]
    expected = gradients(lambda q, k, v: attend(q, k, v, spec, one, "varlen", None), last, dout[-length:])
    assert_equal([x[-length:] for x in found], expected, TOLERANCE)


def test_dropout_of_all_heads_drops_the_same_weights_in_the_backward_pass():
    """With v of one element that is not zero a query, its output is a weight, kept or not. Its gradient is
    zero where it was dropped.
    """
    torch.manual_seed(0)
    heads, tokens, dim = 24, 16384, 16
    assert heads * tokens * tokens > 2**32
    q, k = (torch.zeros(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    v[:, :, 5, 0] = tokens  # every query sees each key with the weight 1 / tokens
    v.requires_grad_()
    mask = torch.ones(1, 1, tokens, tokens, device="cuda", dtype=torch.bool)
    out = masked_attention(q, k, v, mask, 1.0, 0.5)
    kept = out.detach()[..., 0] != 0  # [1, heads, queries]: whether it kept its weight of key 5
    assert abs(kept.float().mean().item() - 0.5) < 0.01
    # dv[5] sums dout over the queries that kept it: with one query's dout, that query's weight.
    for head in (0, heads - 1):
        for queries in (slice(0, 64), slice(tokens - 64, tokens)):
            dout = torch.zeros_like(out)
            dout[0, head, queries, 1] = 1
            (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
            expected = 2 * kept[0, head, queries].sum() / tokens
            assert abs(dv[0, head, 5, 1] - expected) <= 2**-7 * expected
    assert not torch.equal(kept[0, 0], kept[0, -1])  # heads drop weights of their own
