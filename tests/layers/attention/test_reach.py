"""Attention of more elements than torch's kernels address, in parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from liger_models.layers.attention import fused, reach
from liger_models.layers.attention.varlen import varlen_attention
from liger_models.layers.specs import AttentionSpec


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def size(rows, heads, tokens=16):
    """Elements as the kernels count them: tokens rounded up to 128, heads to 64."""
    return rows * heads * -(-tokens // 128) * 128 * 64


@pytest.mark.parametrize(
    ("largest", "parts"),
    [
        (size(3, 4), 1),
        (size(2, 4), 2),
        (size(1, 4), 3),
        (size(1, 2), 6),  # rows and key heads
        (size(1, 1), 12),  # and heads of queries that share keys
    ],
)
def test_parts_have_no_more_elements_than_are_addressed_and_equal_the_whole(monkeypatch, largest, parts):
    sizes = []

    def attend(q, k, v):
        sizes.append(size(q.shape[0], q.shape[1]))
        return by_torch(q, k, v)

    monkeypatch.setattr(reach, "REACH", largest)
    operands = [draw(3, 4, 16, 8), draw(3, 2, 16, 8), draw(3, 2, 16, 8)]
    dout = torch.randn(3, 4, 16, 8, dtype=torch.float64)
    found = []
    for run in (by_torch, lambda *x: reach.attend_in_parts(attend, *x)):
        out = run(*operands)
        found.append((out, *torch.autograd.grad(out, operands, dout)))
    assert len(sizes) == parts
    assert max(sizes) <= largest
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_one_head_of_too_many_elements_is_an_error(monkeypatch):
    monkeypatch.setattr(reach, "REACH", size(1, 1) - 1)
    with pytest.raises(ValueError, match="one attention head has 16 queries of 8 elements"):
        reach.attend_in_parts(by_torch, draw(1, 2, 16, 8), draw(1, 1, 16, 8), draw(1, 1, 16, 8))


@pytest.mark.parametrize(("dtype", "fails"), [(torch.float32, True), (torch.bfloat16, False)])
def test_dropout_numbers_the_weights_of_one_call(monkeypatch, dtype, fails):
    """Heads of 300 x 300 weights: their number counts, more than that of elements."""
    q, k, v = (draw(1, heads, 300, 8, dtype=dtype) for heads in (4, 2, 2))
    monkeypatch.setattr(reach, "REACH", 180_000)  # of elements one head has 24,576, of weights 90,000
    parts = []

    def attend(q, k, v):
        parts.append(q.shape[1])
        return by_torch(q, k, v)

    assert reach.is_within_reach(q, v)
    assert not reach.is_within_reach(q, v, 0.1)
    reach.attend_in_parts(attend, q, k, v, 0.1)
    assert parts == [2, 2]
    monkeypatch.setattr(reach, "REACH", 44_999)
    if fails:
        with pytest.raises(ValueError, match="dropout of 300 x 300 weights"):
            reach.attend_in_parts(attend, q, k, v, 0.1)
    else:
        reach.attend_in_parts(attend, q, k, v, 0.1)
        assert parts[2:] == [1] * 4


def test_rows_of_a_mask_are_fewer_if_heads_draw_weights_to_drop(monkeypatch):
    monkeypatch.setattr(fused, "_MOST_SCORES", 4 * 16 * 8)
    lengths = []

    def attend(q, *rest, **options):
        lengths.append(q.shape[2])
        return torch.zeros_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    q, mask = torch.randn(1, 4, 16, 8), torch.ones(1, 1, 16, 16, dtype=torch.bool)
    for dropout, expected in ((0.0, [16]), (0.1, [8, 8])):
        lengths.clear()
        fused.masked_attention(q, q, q, mask, 0.3, dropout)
        assert lengths == expected


def test_a_gradient_that_is_not_reached_is_copied():
    whole = torch.empty(600_000, 32, 128, dtype=torch.bfloat16, device="meta")
    view = whole[:, 4:8].unflatten(0, (1, -1)).transpose(1, 2)
    copied = reach.within_reach(view)
    assert copied.stride() == (600_000 * 512, 128, 512, 1)
    short = view[:, :, :500_000]
    assert reach.within_reach(short) is short


def test_keys_whose_tokens_are_too_far_apart_are_copied():
    whole = torch.empty(600_000, 32, 128, dtype=torch.bfloat16, device="meta")
    view = whole[:, 4:8].unflatten(0, (1, -1)).transpose(1, 2)
    assert reach.dense(view).stride() == (600_000 * 512, 600_000 * 128, 128, 1)
    short = view[:, :, :500_000]
    assert reach.dense(short) is short


def test_compiled_attention_breaks_the_graph_and_equals_the_whole(monkeypatch):
    monkeypatch.setattr(reach, "REACH", size(1, 4))
    operands = [draw(3, heads, 16, 8) for heads in (4, 2, 2)]

    def run(q, k, v):
        if reach.is_within_reach(q, v):
            return by_torch(q, k, v) * 0
        return reach.attend_in_parts(by_torch, q, k, v) * 2

    with pytest.raises(Exception, match="attention of more than 2\\^31 elements runs eagerly"):
        torch.compile(run, backend="eager", fullgraph=True)(*operands)
    found = torch.compile(lambda *x: run(*x), backend="eager")(*operands)
    torch.testing.assert_close(found, 2 * by_torch(*operands))


def test_compiled_attention_of_some_heads_of_long_rows_is_beyond_reach(monkeypatch):
    """Whose gradient is a view of rows as long, with strides that the compiler chooses."""
    q = draw(16, 4, 8)[:, :1].unflatten(0, (1, 16)).transpose(1, 2)
    monkeypatch.setattr(reach, "REACH", size(1, 1))
    assert reach.is_within_reach(q, q)
    monkeypatch.setattr(reach, "_up", lambda n, multiple: n)
    monkeypatch.setattr(reach, "REACH", 16 * 8)
    assert reach.is_within_reach(q, q)
    found = []
    torch.compile(lambda q: found.append(reach.is_within_reach(q, q)), backend="eager")(q)
    assert found == [False]


def test_packed_documents_of_many_elements_are_split_by_heads(monkeypatch):
    """Each document's rows are rounded up to 128."""
    shapes = []

    def attend(q, k, v, *_, **__):
        shapes.append((q.shape[1], k.shape[1]))
        return q.clone()

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    documents = SimpleNamespace(boundaries=lambda: torch.tensor([0, 7, 16]), max_seqlen=9)
    q, k, v = draw(16, 4, 8), draw(16, 2, 8), draw(16, 2, 8)
    spec, visibility = AttentionSpec(4, 2, 8, 0.3, None), SimpleNamespace(documents=documents, spans=None)
    for largest, expected in ((size(1, 4, 384), [(4, 2)]), (size(1, 4, 384) - 1, [(2, 1)] * 2)):
        shapes.clear()
        monkeypatch.setattr(reach, "REACH", largest)
        assert torch.equal(varlen_attention(q, k, v, spec, visibility), q)
        assert shapes == expected
