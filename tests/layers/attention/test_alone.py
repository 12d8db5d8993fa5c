"""Attention in batch_invariant(): a document's results do not depend on its place."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch

from liger_models.kernels._dispatch import interpret, interpreted
from liger_models.kernels.invariant.mode import batch_invariant
from liger_models.layers.attention import alone
from liger_models.layers.attention.alone import ALIGNED, _align
from liger_models.layers.attention.backends import attend, attend_plain
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec

HEADS, KV_HEADS, DIM = 4, 2, 16
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "lengths", [(5,), (128,), (300, 1, 127, 128, 129, 7), (1, 1, 1), (256, 256), (3, 0, 5), (0, 4, 0)]
)
def test_aligned_documents_begin_tiles_and_hold_their_tokens_in_order(lengths):
    total, bounds = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    rows = _align(Documents((1, total), CPU, max(lengths), bounds))
    found = rows.documents.cu_seqlens
    assert found[0] == 0
    assert found[-1] == rows.documents.num_tokens == len(rows.token_of_row)
    assert (found.diff() >= 0).all()
    assert torch.equal(rows.token_of_row[rows.row_of_token], torch.arange(total))
    for (start, end), length in zip(itertools.pairwise(bounds.tolist()), lengths, strict=True):
        if length:
            place = int(rows.row_of_token[start])
            assert place % ALIGNED == 0
            assert torch.equal(rows.row_of_token[start:end], torch.arange(place, place + length))
            assert place in found
            assert place + length in found


def operands(spec, length):
    generator = torch.Generator().manual_seed(length)
    heads = spec.num_attention_heads, spec.num_key_value_heads, spec.num_key_value_heads
    shapes = ((length, count, DIM) for count in heads)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def run(spec, lengths, inside=True):
    """Outputs, and the gradients of q, k and v, of each document."""
    parts = [operands(spec, length) for length in lengths]
    q, k, v = (torch.cat(tensors).requires_grad_() for tensors in zip(*parts, strict=True))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    sequences = Sequences.from_call((1, sum(lengths)), CPU, cu_seqlens=bounds)
    sinks = torch.linspace(-1, 1, HEADS) if spec.sinks else None
    function = attend if inside else attend_plain
    with batch_invariant() if inside else nullcontext():
        out = function(q, k, v, spec, sequences, sinks=sinks)
    (out * torch.linspace(-1, 1, DIM)).sum().backward()
    parts = (x.split(lengths) for x in (out, q.grad, k.grad, v.grad))
    return {length: own for length, *own in zip(lengths, *parts, strict=True)}


SPECS = {
    "causal": {},
    "window": {"window": 9},
    "chunks": {"chunk": 24},
    "soft cap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "whole documents": {"causal": False},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_document_has_the_same_bits_at_every_place(name):
    check(AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, None, **SPECS[name]), 33, 5, 40)


@pytest.mark.skipif(not interpreted, reason="on a GPU, the tests of whole models run the kernel itself")
def test_a_document_has_the_same_bits_at_every_place_in_the_kernel(monkeypatch):
    monkeypatch.setattr(alone, "ALIGNED", 32)  # the kernel's tiles in float32
    with interpret():
        check(AttentionSpec(2, 1, DIM, DIM**-0.5, None), 9, 33)


def check(spec, *lengths):
    first, second = run(spec, lengths), run(spec, lengths[::-1])
    single = run(spec, lengths[-1:])
    expected = run(spec, lengths, inside=False)
    for length, (out, *gradients) in first.items():
        assert torch.equal(out, second[length][0])
        for found, truth in zip((out, *gradients), expected[length], strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    assert torch.equal(first[lengths[-1]][0], single[lengths[-1]][0])
